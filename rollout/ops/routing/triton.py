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
            HAS_BIAS=bias_N is not None, GROUPS=groups.count, CHOSEN_GROUPS=groups.chosen,
            EXPERTS=triton.next_power_of_2(num_experts),
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
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, EXPERTS)
    logits = tl.load(
        logits_ptr + row * stride + index, mask=index < num_experts, other=float("-inf")
    ).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        order_by = scores
        if HAS_BIAS:
            order_by += tl.load(bias_ptr + index, mask=index < num_experts, other=0.0)
    else:
        exponentials = tl.exp(logits - tl.max(logits, axis=0))
        scores = exponentials / tl.sum(exponentials, axis=0)
        order_by = logits
    keys = tl.where(index < num_experts, _ordered(order_by), -1)
    if GROUPS > 1:
        # Each round takes the best of the remaining groups.
        remaining = keys
        for _ in tl.static_range(CHOSEN_GROUPS):
            best_key = tl.full((), -1, tl.int64)
            best_group = 0
            for group in tl.static_range(GROUPS):
                members = tl.where(index // group_size == group, remaining, -1)
                first = tl.argmax(members, axis=0, tie_break_left=True)
                group_key = tl.max(members, axis=0)
                if SIGMOID:
                    second = tl.argmax(
                        tl.where(index == first, -1, members), axis=0, tie_break_left=True
                    )
                    top = tl.sum(tl.where(index == first, order_by, 0.0), axis=0)
                    top += tl.sum(tl.where(index == second, order_by, 0.0), axis=0)
                    group_key = tl.where(group_key < 0, -1, _ordered(top))
                is_better = group_key > best_key
                best_group = tl.where(is_better, group, best_group)
                best_key = tl.where(is_better, group_key, best_key)
            remaining = tl.where(index // group_size == best_group, -1, remaining)
        keys = tl.where(remaining < 0, keys, -1)
    rank = tl.arange(0, RANKS)
    experts = tl.zeros((RANKS,), dtype=tl.int32)
    weights = tl.zeros((RANKS,), dtype=tl.float32)
    total = 0.0
    for chosen in tl.static_range(CHOSEN):
        expert = tl.argmax(keys, axis=0, tie_break_left=True).to(tl.int32)
        weight = tl.sum(tl.where(index == expert, scores, 0.0), axis=0)
        experts = tl.where(rank == chosen, expert, experts)
        weights = tl.where(rank == chosen, weight, weights)
        total += weight
        keys = tl.where(index == expert, -1, keys)
    if NORMALIZES:
        weights /= total + 1e-20
    weights *= factor
    tl.store(experts_ptr + row * CHOSEN + rank, experts, mask=rank < CHOSEN)
    tl.store(weights_ptr + row * CHOSEN + rank, weights, mask=rank < CHOSEN)
