"""A sigmoid gate on a GPU: a program per row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> None:
    if x.dim() == 2:
        x, gate = x.unsqueeze(1), gate.unsqueeze(1)
    rows, heads, width = x.shape
    if x.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        _sigmoid_gate_kernel[(rows * heads, triton.cdiv(width, block))](
            x, gate, *x.stride()[:2], *gate.stride()[:2], heads, width,
            BLOCK=block, num_warps=max(1, block // 256), enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _sigmoid_gate_kernel(
    x_ptr, gate_ptr, x_stride, x_head_stride, gate_stride, gate_head_stride, heads, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row, head = index // heads, index % heads
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x_ptrs = x_ptr + row * x_stride + head * x_head_stride + column
    x = tl.load(x_ptrs, mask=inside).to(tl.float32)
    gate_ptrs = gate_ptr + row * gate_stride + head * gate_head_stride + column
    gate = tl.load(gate_ptrs, mask=inside).to(tl.float32)
    gated = x * (1.0 / (1.0 + tl.exp(-gate)))
    tl.store(x_ptrs, gated.to(x_ptr.dtype.element_ty), mask=inside)
