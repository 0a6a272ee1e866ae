"""The gate of a SwiGLU MLP on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(rows, width)
    if out_TF.numel():
        _silu_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up_T2F, out_TF, gate_up_T2F.stride(0), width,
            BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_TF


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_up_ptr += row * stride
    gate = tl.load(gate_up_ptr + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up_ptr + width + column, mask=inside).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)
