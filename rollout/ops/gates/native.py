"""Gates on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["delta_gates", "gated_rms_norm", "sigmoid_gate_", "supports"]


def delta_gates(
    a_TG: torch.Tensor, b_TG: torch.Tensor, A_log_G: torch.Tensor, dt_bias_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_decay_TG = torch.empty(a_TG.shape, dtype=torch.float32)
    beta_TG = torch.empty_like(log_decay_TG)
    A_log_G, dt_bias_G = A_log_G.float().contiguous(), dt_bias_G.float().contiguous()
    cpu.delta_gates(
        DTYPE_CODES[a_TG.dtype],
        a_TG.data_ptr(),
        a_TG.shape,
        a_TG.stride(),
        b_TG.data_ptr(),
        b_TG.shape,
        b_TG.stride(),
        A_log_G.data_ptr(),
        A_log_G.numel(),
        dt_bias_G.data_ptr(),
        dt_bias_G.numel(),
        log_decay_TG.data_ptr(),
        beta_TG.data_ptr(),
        torch.get_num_threads(),
    )
    return log_decay_TG, beta_TG


def gated_rms_norm(
    x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    out_TGV = torch.empty_like(x_TGV, memory_format=torch.contiguous_format)
    cpu.gated_rms_norm(
        DTYPE_CODES[x_TGV.dtype],
        x_TGV.data_ptr(),
        x_TGV.shape,
        x_TGV.stride(),
        gate_TGV.data_ptr(),
        gate_TGV.shape,
        gate_TGV.stride(),
        weight_V.data_ptr(),
        weight_V.numel(),
        eps,
        out_TGV.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TGV


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> None:
    if x.dim() == 2:
        x, gate = x.unsqueeze(1), gate.unsqueeze(1)
    cpu.sigmoid_gate(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        x.shape,
        x.stride(),
        gate.data_ptr(),
        gate.shape,
        gate.stride(),
        torch.get_num_threads(),
    )
