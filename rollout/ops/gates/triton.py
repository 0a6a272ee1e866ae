"""Gates on a GPU: a program for each row, or each row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def delta_gates(
    a_TG: torch.Tensor, b_TG: torch.Tensor, A_log_G: torch.Tensor, dt_bias_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = a_TG.shape
    log_decay_TG = a_TG.new_empty(a_TG.shape, dtype=torch.float32)
    beta_TG = torch.empty_like(log_decay_TG)
    if beta_TG.numel():
        _delta_gates_kernel[(rows,)](
            a_TG, b_TG, A_log_G, dt_bias_G, log_decay_TG, beta_TG, a_TG.stride(0), b_TG.stride(0),
            heads, BLOCK=triton.next_power_of_2(heads), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return log_decay_TG, beta_TG


@triton.jit
def _softplus(x):
    """max(x, 0) + log1p(u) with u = exp(-|x|); log1p(u) = 2 artanh(u / (2 + u)), by its series."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    square = s * s
    series = square * (1.0 / 13.0) + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _delta_gates_kernel(
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, log_decay_ptr, beta_ptr, a_stride, b_stride, heads,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < heads
    a = tl.load(a_ptr + row * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    A_log = tl.load(A_log_ptr + head, mask=inside, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head, mask=inside, other=0.0).to(tl.float32)
    log_decay = -tl.exp(A_log) * _softplus(a + dt_bias)
    tl.store(log_decay_ptr + row * heads + head, log_decay, mask=inside)
    tl.store(beta_ptr + row * heads + head, 1.0 / (1.0 + tl.exp(-b)), mask=inside)


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
