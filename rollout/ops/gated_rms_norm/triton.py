"""Gated RMS normalisation on a GPU: one program per row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def gated_rms_norm(
    x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    rows, heads, width = x_TGV.shape
    out_TGV = torch.empty_like(x_TGV, memory_format=torch.contiguous_format)
    if out_TGV.numel():
        _gated_rms_norm_kernel[(rows * heads,)](
            x_TGV, gate_TGV, weight_V, out_TGV, *x_TGV.stride()[:2], *gate_TGV.stride()[:2],
            heads, width, eps,
            BLOCK=triton.next_power_of_2(width), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out_TGV


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, x_stride, x_head_stride, gate_stride, gate_head_stride,
    heads, width, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row, head = index // heads, index % heads
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + head * x_head_stride + column, mask=inside, other=0.0)
    gate_ptrs = gate_ptr + row * gate_stride + head * gate_head_stride + column
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    normed = ((x * scale).to(weight.dtype) * weight).to(tl.float32)
    out = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + index * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)
