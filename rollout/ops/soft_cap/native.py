"""The soft cap of logits on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["soft_cap_", "supports"]


def soft_cap_(x_RV: torch.Tensor, cap: float) -> None:
    cpu.soft_cap(
        DTYPE_CODES[x_RV.dtype],
        x_RV.data_ptr(),
        x_RV.shape,
        x_RV.stride(),
        cap,
        torch.get_num_threads(),
    )
