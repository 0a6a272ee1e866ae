"""Rotary position embedding on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, IS_INT64, cpu, supports

__all__ = ["rotary_", "supports"]


def rotary_(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor
) -> None:
    positions_T, cos_sin_PR = positions_T.contiguous(), cos_sin_PR.float().contiguous()
    cpu.rotary(
        DTYPE_CODES[q_THD.dtype],
        q_THD.data_ptr(),
        q_THD.shape,
        q_THD.stride(),
        k_TKD.data_ptr(),
        k_TKD.shape,
        k_TKD.stride(),
        positions_T.data_ptr(),
        positions_T.numel(),
        IS_INT64[positions_T.dtype],
        cos_sin_PR.data_ptr(),
        cos_sin_PR.shape,
        torch.get_num_threads(),
    )
