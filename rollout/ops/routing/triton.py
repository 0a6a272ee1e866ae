"""Top-k routing on a GPU: a program per row, which finds the largest value X times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops.routing.method import Groups


def route(
    logits_TN: torch.Tensor,
    experts_per_row: int,
    normalizes: bool,
    groups: Groups,
    bias_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, num_experts = logits_TN.shape
    shape, device = (rows, experts_per_row), logits_TN.device
    experts_TX = torch.empty(shape, dtype=torch.int32, device=device)
    weights_TX = torch.empty(shape, dtype=torch.float32, device=device)
    if rows:
        _route_kernel[(rows,)](
            logits_TN, bias_N, experts_TX, weights_TX, logits_TN.stride(0), num_experts,
            num_experts // groups.count, groups.factor,
            CHOSEN=experts_per_row, NORMALIZES=normalizes, SIGMOID=groups.sigmoid,
            HAS_BIAS=bias_N is not None, HAS_GROUPS=groups.count > 1,
            CHOSEN_GROUPS=groups.chosen, GROUPS=triton.next_power_of_2(groups.count),
            SIZE=triton.next_power_of_2(num_experts // groups.count),
            RANKS=triton.next_power_of_2(experts_per_row),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return experts_TX, weights_TX


@triton.jit
def _ordered(values):
    """Integers in the order of the floats (-0.0 is 0.0): below all of them there is room for -1."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, experts_ptr, weights_ptr, stride, num_experts, group_size, factor,
    CHOSEN: tl.constexpr, NORMALIZES: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # Group after group, each with room for SIZE experts: lanes are in the order of experts.
    lane = tl.arange(0, GROUPS * SIZE)
    index = lane // SIZE * group_size + lane % SIZE
    inside = (lane % SIZE < group_size) & (index < num_experts)
    logits = tl.load(logits_ptr + row * stride + index, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        order_by = scores
        if HAS_BIAS:
            order_by += tl.load(bias_ptr + index, mask=inside, other=0.0)
    else:
        exponentials = tl.exp(logits - tl.max(logits, axis=0))
        scores = exponentials / tl.sum(exponentials, axis=0)
        order_by = logits
    keys = tl.where(inside, _ordered(order_by), -1)
    if HAS_GROUPS:
        member = tl.arange(0, SIZE)[None, :]
        members = tl.reshape(keys, (GROUPS, SIZE))
        best = tl.max(members, axis=1)
        if SIGMOID:
            first = tl.argmax(members, axis=1, tie_break_left=True)[:, None]
            others = tl.where(member == first, -1, members)
            second = tl.argmax(others, axis=1, tie_break_left=True)[:, None]
            is_top = (member == first) | (member == second)
            top = tl.sum(tl.where(is_top, tl.reshape(order_by, (GROUPS, SIZE)), 0.0), axis=1)
            best = tl.where(best < 0, -1, _ordered(top))
        group = tl.arange(0, GROUPS)
        is_chosen = group < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            chosen_group = tl.argmax(best, axis=0, tie_break_left=True)
            is_chosen = is_chosen | (group == chosen_group)
            best = tl.where(group == chosen_group, -1, best)
        keys = tl.reshape(tl.where(is_chosen[:, None], members, -1), (GROUPS * SIZE,))
    rank = tl.arange(0, RANKS)
    experts = tl.zeros((RANKS,), dtype=tl.int32)
    weights = tl.zeros((RANKS,), dtype=tl.float32)
    total = 0.0
    for chosen in tl.static_range(CHOSEN):
        is_best = lane == tl.argmax(keys, axis=0, tie_break_left=True)
        weight = tl.sum(tl.where(is_best, scores, 0.0), axis=0)
        experts = tl.where(rank == chosen, tl.sum(tl.where(is_best, index, 0), axis=0), experts)
        weights = tl.where(rank == chosen, weight, weights)
        total += weight
        keys = tl.where(is_best, -1, keys)
    if NORMALIZES:
        weights /= total + 1e-20
    weights *= factor
    tl.store(experts_ptr + row * CHOSEN + rank, experts, mask=rank < CHOSEN)
    tl.store(weights_ptr + row * CHOSEN + rank, weights, mask=rank < CHOSEN)
