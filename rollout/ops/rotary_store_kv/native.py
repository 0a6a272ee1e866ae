"""Rotary position embedding and the scatter of keys and values, on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, IS_INT64, cpu, supports

__all__ = ["rotary_store_kv_", "supports"]


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
    positions_T, cos_sin_PR = positions_T.contiguous(), cos_sin_PR.float().contiguous()
    slots_T = slots_T.contiguous()
    v, v_pool, v_address = k_TKD, k_pool_SKD, 0  # 0: only keys are stored
    if v_TKD is not None and v_pool_SKD is not None:
        v, v_pool, v_address = v_TKD, v_pool_SKD, v_TKD.data_ptr()
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
    cpu.store_kv(
        DTYPE_CODES[k_TKD.dtype],
        k_TKD.shape,
        k_TKD.data_ptr(),
        k_TKD.stride(),
        v_address,
        v.shape,
        v.stride(),
        k_pool_SKD.shape,
        k_pool_SKD.data_ptr(),
        k_pool_SKD.stride(),
        v_pool.data_ptr(),
        v_pool.shape,
        v_pool.stride(),
        slots_T.data_ptr(),
        slots_T.numel(),
        IS_INT64[slots_T.dtype],
        torch.get_num_threads(),
    )
