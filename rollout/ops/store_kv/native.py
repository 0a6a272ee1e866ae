"""Scatter keys and values between CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, IS_INT64, cpu, supports

__all__ = ["store_kv", "supports"]


def store_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    slots_T = slots_T.contiguous()
    cpu.store_kv(
        DTYPE_CODES[k_TKD.dtype],
        k_TKD.shape,
        k_TKD.data_ptr(),
        k_TKD.stride(),
        v_TKD.data_ptr(),
        v_TKD.shape,
        v_TKD.stride(),
        k_pool_SKD.shape,
        k_pool_SKD.data_ptr(),
        k_pool_SKD.stride(),
        v_pool_SKD.data_ptr(),
        v_pool_SKD.shape,
        v_pool_SKD.stride(),
        slots_T.data_ptr(),
        slots_T.numel(),
        IS_INT64[slots_T.dtype],
        torch.get_num_threads(),
    )
