"""Gated activations on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_SILU = tl.constexpr(0)
_GELU = tl.constexpr(1)
_CLAMPED_SILU = tl.constexpr(2)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return _gated_mul(_SILU, gate_up_T2F)


def gelu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return _gated_mul(_GELU, gate_up_T2F)


def clamped_silu_mul(gate_up_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return _gated_mul(_CLAMPED_SILU, gate_up_T2F, alpha, limit)


def _gated_mul(
    gate: tl.constexpr, gate_up_T2F: torch.Tensor, alpha: float = 1.0, limit: float = 0.0
) -> torch.Tensor:
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(rows, width)
    if out_TF.numel():
        _gated_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up_T2F, out_TF, gate_up_T2F.stride(0), width, alpha, limit,
            GATE=gate.value, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_TF


@triton.jit(do_not_specialize=["alpha", "limit"])
def _gated_mul_kernel(
    gate_up_ptr, out_ptr, stride, width, alpha, limit, GATE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_up_ptr += row * stride
    gate = tl.load(gate_up_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + width + column, mask=inside, other=0.0).to(tl.float32)
    if GATE == _SILU:
        out = gate / (1.0 + tl.exp(-gate)) * up
    elif GATE == _GELU:
        # x / 2 (1 + tanh(y)) is x sigmoid(2 y), which does not cancel.
        cubic = gate + 0.044715 * gate * gate * gate
        out = gate / (1.0 + tl.exp(-1.5957691216057308 * cubic)) * up
    else:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)
