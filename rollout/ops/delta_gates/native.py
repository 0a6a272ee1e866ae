"""The gates of a gated delta rule on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["delta_gates", "supports"]


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
