"""Scatter this step's keys and values into their slots on a GPU: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def store_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    rows, kv_heads, head_dim = k_TKD.shape
    if not k_TKD.numel():
        return
    block = triton.next_power_of_2(kv_heads * head_dim)
    _store_kv_kernel[(rows,)](
        k_TKD, v_TKD, k_pool_SKD, v_pool_SKD, slots_T.contiguous(),
        *k_TKD.stride()[:2], *v_TKD.stride()[:2],
        *k_pool_SKD.stride()[:2], *v_pool_SKD.stride()[:2],
        k_pool_SKD.shape[0], kv_heads, head_dim,
        BLOCK=block, num_warps=min(8, max(1, block // 256)), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def _store_kv_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, slots_ptr,
    k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    k_slot_stride, k_pool_head_stride, v_slot_stride, v_pool_head_stride,
    num_slots, kv_heads, head_dim, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    index = tl.arange(0, BLOCK)
    head, dim = index // head_dim, index % head_dim
    inside = head < tl.where((slot >= 0) & (slot < num_slots), kv_heads, 0)
    k = tl.load(k_ptr + row * k_row_stride + head * k_head_stride + dim, mask=inside)
    v = tl.load(v_ptr + row * v_row_stride + head * v_head_stride + dim, mask=inside)
    k_pool_ptr += slot * k_slot_stride
    v_pool_ptr += slot * v_slot_stride
    tl.store(k_pool_ptr + head * k_pool_head_stride + dim, k, mask=inside)
    tl.store(v_pool_ptr + head * v_pool_head_stride + dim, v, mask=inside)
