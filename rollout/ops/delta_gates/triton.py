"""The gates of a gated delta rule on a GPU: a program per row."""

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
