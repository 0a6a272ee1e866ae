"""The short convolution on a GPU: a program per row and block of channels.

Inputs are read along the row's path: its ancestors' rows of x, and before them the entry's source
state. So no row waits for another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops import gpu
from rollout.ops.entry_lookup import entry_of_row
from rollout.ops.state_plan import StatePlan

_BLOCK = 512


def supports(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_SCw: torch.Tensor,
) -> bool:
    tensors = (x_TC, weight_CW) if bias_C is None else (x_TC, weight_CW, bias_C)
    return gpu.supports(*tensors, states_SCw) and states_SCw[0].is_contiguous()


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_SCw: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    rows, channels = x_TC.shape
    y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    if not y_TC.numel():
        return y_TC
    num_entries = plan.sources_B.numel()
    block = min(_BLOCK, triton.next_power_of_2(channels))
    _causal_conv_kernel[(rows, triton.cdiv(channels, block))](
        x_TC, weight_CW, weight_CW if bias_C is None else bias_C, states_SCw, y_TC,
        plan.q_offsets_B1, plan.sources_B, plan.parents_T, plan.targets_T, num_entries,
        x_TC.stride(0), weight_CW.stride(0), states_SCw.stride(0), channels,
        HAS_BIAS=bias_C is not None, TAPS=weight_CW.shape[1], BLOCK=block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y_TC


@triton.jit(do_not_specialize=["num_entries"])
def _causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, states_ptr, y_ptr,
    q_offsets_ptr, sources_ptr, parents_ptr, targets_ptr, num_entries,
    x_stride, weight_stride, slot_stride, channels,
    HAS_BIAS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    entry = entry_of_row(q_offsets_ptr, num_entries, row)
    is_entry = entry < num_entries  # the rows after the last entry's are padding
    source = tl.load(sources_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    target = tl.load(targets_ptr + row, mask=is_entry, other=0).to(tl.int64)
    stored = channel < tl.where(target != 0, channels, 0)
    state_ptrs = states_ptr + channel * (TAPS - 1)

    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        ancestor, own = row, 0  # `own`: of the inputs after this tap's, those of this step
        for _ in tl.static_range(TAPS - 1 - tap):
            own += (ancestor >= 0).to(tl.int32)
            ancestor = tl.load(parents_ptr + ancestor, mask=(ancestor >= 0) & is_entry, other=-1)
        from_x = channel < tl.where((ancestor >= 0) & is_entry, channels, 0)
        from_state = channel < tl.where((ancestor < 0) & (source != 0), channels, 0)
        x_ptrs = x_ptr + ancestor.to(tl.int64) * x_stride + channel
        old_ptrs = state_ptrs + source * slot_stride + (tap + own - 1)
        x = tl.load(x_ptrs, mask=from_x, other=0.0)
        old = tl.load(old_ptrs, mask=from_state, other=0.0)
        value = tl.where(ancestor >= 0, x, old)
        if tap > 0:
            new_ptrs = state_ptrs + target * slot_stride + (tap - 1)
            tl.store(new_ptrs, value, mask=stored)
        weight = tl.load(weight_ptr + channel * weight_stride + tap, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight.to(tl.float32)
    y = total / (1.0 + tl.exp(-total))
    y = tl.where(is_entry, y, 0.0)
    y_ptrs = y_ptr + row.to(tl.int64) * channels + channel
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside)
