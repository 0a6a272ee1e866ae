"""Scatter this step's keys and values. T rows, K kv heads, D head_dim, S slots."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.store_kv import native, reference


def store_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """``pool[slots[t]] = row t`` for keys and values; all of one dtype, slots int32 or int64.

    Raises IndexError when a slot is outside [0, S); nothing is written then. On a GPU it is that
    row that is not written, and nothing is raised.
    """
    if gpu.supports(k_TKD, v_TKD, k_pool_SKD, v_pool_SKD):
        from rollout.ops.store_kv import triton

        triton.store_kv(k_TKD, v_TKD, k_pool_SKD, v_pool_SKD, slots_T)
    elif native.supports(k_TKD, v_TKD, k_pool_SKD, v_pool_SKD):
        native.store_kv(k_TKD, v_TKD, k_pool_SKD, v_pool_SKD, slots_T)
    else:
        reference.store_kv(k_TKD, v_TKD, k_pool_SKD, v_pool_SKD, slots_T)
