"""Rotary position embedding, then the scatter of keys and values into their slots.

T rows, H query heads, K kv heads, D head_dim, P positions, R rotated dims, S slots.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.rotary_store_kv import native, reference


def rotary_store_kv_(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor | None,
    positions_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor | None,
    slots_T: torch.Tensor,
) -> None:
    """Rotate q in place; ``pool[slots[t]] = row t`` for rotated keys and for values.

    The first R <= D dims of every head are rotated, in float32 with one rounding; dim i pairs with
    dim i + R/2. ``k_TKD`` is undefined afterwards. Without values only keys are stored.

    Raises IndexError for a position outside the table or a slot outside [0, S), and then leaves the
    pools as they were. On a GPU nothing is raised: a position outside the table makes its row's
    rotated dims NaN, and a row whose slot is outside is not stored.

    Args:
        q_THD, k_TKD, v_TKD, k_pool_SKD, v_pool_SKD: of one dtype; may be strided, with contiguous
            elements of a head.
        positions_T, slots_T: int32 or int64.
        cos_sin_PR: float32, R/2 cosines then R/2 sines per position; R may be 0.
    """
    given = (q_THD, k_TKD, v_TKD, k_pool_SKD, v_pool_SKD)
    tensors = [tensor for tensor in given if tensor is not None]
    if gpu.supports(*tensors):
        from rollout.ops.rotary_store_kv import triton

        op = triton.rotary_store_kv_
    elif native.supports(*tensors):
        op = native.rotary_store_kv_
    else:
        op = reference.rotary_store_kv_
    op(q_THD, k_TKD, v_TKD, positions_T, cos_sin_PR, k_pool_SKD, v_pool_SKD, slots_T)
