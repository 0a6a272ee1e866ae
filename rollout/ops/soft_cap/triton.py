"""The soft cap of logits on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops.tanh import tanh

_BLOCK = 1024


def soft_cap_(x_RV: torch.Tensor, cap: float) -> None:
    rows, width = x_RV.shape
    if x_RV.numel():
        _soft_cap_kernel[(rows, triton.cdiv(width, _BLOCK))](
            x_RV, x_RV.stride(0), width, cap, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
        )


@triton.jit(do_not_specialize=["cap"])
def _soft_cap_kernel(x_ptr, stride, width, cap, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x_ptr += tl.program_id(0).to(tl.int64) * stride + column
    x = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr, (cap * tanh(x / cap)).to(x_ptr.dtype.element_ty), mask=inside)
