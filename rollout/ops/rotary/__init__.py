"""Rotary position embedding. T rows, H query heads, K kv heads, D head_dim, P positions."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.rotary import native, reference


def rotary_(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor
) -> None:
    """Rotate the first R <= D dims of every head in place, in float32 with one rounding.

    q_THD, k_TKD: one dtype, strided views are fine where elements of a head are adjacent.
    positions_T: int32 or int64. cos_sin_PR: float32, R/2 cosines then R/2 sines per position;
    dim i turns with dim i + R/2.
    Raises IndexError for a position outside the table; on a GPU its row becomes NaN instead.
    """
    if gpu.supports(q_THD, k_TKD):
        from rollout.ops.rotary import triton

        triton.rotary_(q_THD, k_TKD, positions_T, cos_sin_PR)
    elif native.supports(q_THD, k_TKD):
        native.rotary_(q_THD, k_TKD, positions_T, cos_sin_PR)
    else:
        reference.rotary_(q_THD, k_TKD, positions_T, cos_sin_PR)
