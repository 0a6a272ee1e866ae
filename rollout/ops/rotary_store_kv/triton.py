"""Rotary position embedding and the scatter of keys and values on a GPU.

A program has a few heads of one row. It rotates query heads in place, or rotates key heads while it
copies them and the value heads into the pools.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NUMBERS = 1024  # elements of a program's heads


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
    rows, heads, head_dim = q_THD.shape
    kv_heads = k_TKD.shape[1]
    half = cos_sin_PR.shape[1] // 2
    if not rows:
        return
    has_values = v_TKD is not None and v_pool_SKD is not None
    values = v_TKD if v_TKD is not None else k_TKD
    v_pool = v_pool_SKD if v_pool_SKD is not None else k_pool_SKD
    dims = triton.next_power_of_2(head_dim)
    block_heads = max(1, _NUMBERS // dims)
    q_programs = triton.cdiv(heads, block_heads) if half else 0
    _rotary_store_kv_kernel[(rows, q_programs + triton.cdiv(kv_heads, block_heads))](
        q_THD, k_TKD, values, positions_T.contiguous(), cos_sin_PR,
        k_pool_SKD, v_pool, slots_T.contiguous(),
        *q_THD.stride()[:2], *k_TKD.stride()[:2], *values.stride()[:2], cos_sin_PR.stride(0),
        *k_pool_SKD.stride()[:2], *v_pool.stride()[:2],
        heads, kv_heads, head_dim, half, cos_sin_PR.shape[0], k_pool_SKD.shape[0], q_programs,
        HAS_VALUES=has_values, HEADS=block_heads, PAIRS=triton.next_power_of_2(max(1, half)),
        DIMS=dims, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def _rotary_store_kv_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_sin_ptr, k_pool_ptr, v_pool_ptr, slots_ptr,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    table_stride, k_slot_stride, k_pool_head_stride, v_slot_stride, v_pool_head_stride,
    heads, kv_heads, head_dim, half, num_positions, num_slots, q_programs,
    HAS_VALUES: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    # A position outside the table makes its row NaN, because a GPU cannot raise.
    known = tl.where((position >= 0) & (position < num_positions), half, 0)
    pair = tl.arange(0, PAIRS)
    angle_ptr = cos_sin_ptr + position * table_stride + pair
    cos = tl.load(angle_ptr, mask=pair < known, other=float("nan"))[None, :]
    sin = tl.load(angle_ptr + half, mask=pair < known, other=float("nan"))[None, :]
    if part < q_programs:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        q_heads_ptr = q_ptr + row * q_row_stride + head * q_head_stride
        _turn(q_heads_ptr, q_heads_ptr, head < heads, cos, sin, half, PAIRS)
    else:
        head = (part - q_programs) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = head < tl.where((slot >= 0) & (slot < num_slots), kv_heads, 0)
        k_from_ptr = k_ptr + row * k_row_stride + head * k_head_stride
        v_from_ptr = v_ptr + row * v_row_stride + head * v_head_stride
        k_to_ptr = k_pool_ptr + slot * k_slot_stride + head * k_pool_head_stride
        v_to_ptr = v_pool_ptr + slot * v_slot_stride + head * v_pool_head_stride
        dim = tl.arange(0, DIMS)[None, :]
        of_v = inside & (dim < head_dim)
        of_k = of_v & (dim >= 2 * half)  # not rotated
        k = tl.load(k_from_ptr + dim, mask=of_k)
        _turn(k_from_ptr, k_to_ptr, inside, cos, sin, half, PAIRS)
        if HAS_VALUES:
            tl.store(v_to_ptr + dim, tl.load(v_from_ptr + dim, mask=of_v), mask=of_v)
        tl.store(k_to_ptr + dim, k, mask=of_k)


@triton.jit
def _turn(from_ptr, to_ptr, inside, cos, sin, half, PAIRS: tl.constexpr):
    """Rotate the heads at ``from_ptr`` and store them at ``to_ptr``, which may be the same."""
    pair = tl.arange(0, PAIRS)[None, :]
    inside = inside & (pair < half)
    first = tl.load(from_ptr + pair, mask=inside).to(tl.float32)
    second = tl.load(from_ptr + pair + half, mask=inside).to(tl.float32)
    dtype = to_ptr.dtype.element_ty
    tl.store(to_ptr + pair, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(to_ptr + pair + half, (second * cos + first * sin).to(dtype), mask=inside)
