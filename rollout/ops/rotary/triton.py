"""Rotary position embedding on a GPU: a program turns a few heads of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PAIRS = 512  # per program


def rotary_(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor
) -> None:
    rows, heads, _ = q_THD.shape
    kv_heads = k_TKD.shape[1]
    half = cos_sin_PR.shape[1] // 2
    if not rows or not half:
        return
    block = triton.next_power_of_2(half)
    block_heads = max(1, _PAIRS // block)
    q_programs = triton.cdiv(heads, block_heads)
    _rotary_kernel[(rows, q_programs + triton.cdiv(kv_heads, block_heads))](
        q_THD, k_TKD, positions_T.contiguous(), cos_sin_PR,
        *q_THD.stride()[:2], *k_TKD.stride()[:2], cos_sin_PR.stride(0),
        heads, kv_heads, cos_sin_PR.shape[0], half, q_programs,
        HEADS=block_heads, BLOCK=block, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, positions_ptr, cos_sin_ptr,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, table_stride,
    heads, kv_heads, num_positions, half, q_programs,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int64)
    # A position that is not in the table makes its row NaN: nothing on a GPU can raise.
    known = tl.where((position >= 0) & (position < num_positions), half, 0)
    dim = tl.arange(0, BLOCK)
    angle_ptr = cos_sin_ptr + position * table_stride + dim
    cos = tl.load(angle_ptr, mask=dim < known, other=float("nan"))[None, :]
    sin = tl.load(angle_ptr + half, mask=dim < known, other=float("nan"))[None, :]
    if part < q_programs:
        q_ptr += row * q_row_stride
        _turn(q_ptr, q_head_stride, part, heads, cos, sin, half, HEADS, BLOCK)
    else:
        k_ptr += row * k_row_stride
        _turn(k_ptr, k_head_stride, part - q_programs, kv_heads, cos, sin, half, HEADS, BLOCK)


@triton.jit
def _turn(
    x_ptr, head_stride, part, heads, cos, sin, half, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    head = part * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (dim < half)
    first_ptr = x_ptr + head * head_stride + dim
    second_ptr = first_ptr + half
    first = tl.load(first_ptr, mask=inside).to(tl.float32)
    second = tl.load(second_ptr, mask=inside).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(second_ptr, (second * cos + first * sin).to(dtype), mask=inside)
