"""RMS normalisation on a GPU: one program per row, so no row sees another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WARP_ELEMENTS = 512  # elements of a row per warp


def rms_norm(
    x: torch.Tensor, weight_E: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    if x.dim() not in (2, 3):
        return rms_norm(x.reshape(-1, x.shape[-1]), weight_E, eps, unit_offset).view(x.shape)
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    if out.numel():
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(x.shape[0] * heads,)](
            x, weight_E, out, x.stride(0), head_stride, heads, width, eps,
            UNIT_OFFSET=unit_offset, BLOCK=block, num_warps=_num_warps(block),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def add_rms_norm(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> torch.Tensor:
    out_TE = torch.empty_like(residual_TE, memory_format=torch.contiguous_format)
    rows, width = x_TE.shape
    if out_TE.numel():
        block = triton.next_power_of_2(width)
        _add_rms_norm_kernel[(rows,)](
            x_TE, residual_TE, weight_E, out_TE, x_TE.stride(0), residual_TE.stride(0), width, eps,
            UNIT_OFFSET=unit_offset, BLOCK=block, num_warps=_num_warps(block),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out_TE


def _num_warps(block: int) -> int:
    return min(16, max(1, block // _WARP_ELEMENTS))


@triton.jit
def _normed(x, weight, width, eps, UNIT_OFFSET: tl.constexpr):
    """The norm of one float32 row, zero past the width. Rounds where the reference rounds."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    if UNIT_OFFSET:
        normed = (x * scale * (1.0 + weight.to(tl.float32))).to(weight.dtype)
    else:
        normed = (x * scale).to(weight.dtype) * weight
    return normed


@triton.jit(do_not_specialize=["heads"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, row_stride, head_stride, heads, width, eps,
    UNIT_OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    start = index // heads * row_stride + index % heads * head_stride
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside)
    normed = _normed(x, weight, width, eps, UNIT_OFFSET)
    tl.store(out_ptr + index * width + column, normed, mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, width, eps,
    UNIT_OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    residual_ptr += row * residual_stride
    residual = tl.load(residual_ptr + column, mask=inside, other=0.0)
    residual = (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptr + column, residual, mask=inside)
    weight = tl.load(weight_ptr + column, mask=inside)
    normed = _normed(residual.to(tl.float32), weight, width, eps, UNIT_OFFSET)
    tl.store(out_ptr + row * width + column, normed, mask=inside)
