"""The soft cap of logits (Gemma 2, 2024). R rows, V vocabulary."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.soft_cap import native, reference


def soft_cap_(x_RV: torch.Tensor, cap: float) -> None:
    """``x = cap * tanh(x / cap)`` in place, in float32 with one rounding. Columns are adjacent."""
    if gpu.supports(x_RV):
        from rollout.ops.soft_cap import triton

        triton.soft_cap_(x_RV, cap)
    elif native.supports(x_RV):
        native.soft_cap_(x_RV, cap)
    else:
        reference.soft_cap_(x_RV, cap)
