"""Gated RMS normalisation on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["gated_rms_norm", "supports"]


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
