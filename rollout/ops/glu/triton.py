"""Gates of MLPs on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def gelu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return _gated_mul(gate_up_T2F, 1.0, 0.0, is_clamped=False)


def clamped_silu_mul(gate_up_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return _gated_mul(gate_up_T2F, alpha, limit, is_clamped=True)


def _gated_mul(
    gate_up_T2F: torch.Tensor, alpha: float, limit: float, *, is_clamped: bool
) -> torch.Tensor:
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(rows, width)
    if out_TF.numel():
        _gated_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up_T2F, out_TF, gate_up_T2F.stride(0), width, alpha, limit,
            IS_CLAMPED=is_clamped, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_TF


@triton.jit(do_not_specialize=["alpha", "limit"])
def _gated_mul_kernel(
    gate_up_ptr, out_ptr, stride, width, alpha, limit,
    IS_CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_up_ptr += row * stride
    gate = tl.load(gate_up_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + width + column, mask=inside, other=0.0).to(tl.float32)
    if IS_CLAMPED:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        # x / 2 (1 + tanh(y)) is x sigmoid(2 y), which does not cancel.
        cubic = gate + 0.044715 * gate * gate * gate
        out = gate / (1.0 + tl.exp(-1.5957691216057308 * cubic)) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)
