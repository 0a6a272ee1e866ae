"""Top-k routing on a GPU: a program per row, which finds the largest logit X times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def route(
    logits_TN: torch.Tensor, experts_per_row: int, normalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, num_experts = logits_TN.shape
    shape, device = (rows, experts_per_row), logits_TN.device
    experts_TX = torch.empty(shape, dtype=torch.int32, device=device)
    weights_TX = torch.empty(shape, dtype=torch.float32, device=device)
    if rows:
        _route_kernel[(rows,)](
            logits_TN, experts_TX, weights_TX, logits_TN.stride(0), num_experts,
            CHOSEN=experts_per_row, NORMALIZES=normalizes,
            EXPERTS=triton.next_power_of_2(num_experts),
            RANKS=triton.next_power_of_2(experts_per_row),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return experts_TX, weights_TX


@triton.jit
def _route_kernel(
    logits_ptr, experts_ptr, weights_ptr, stride, num_experts,
    CHOSEN: tl.constexpr, NORMALIZES: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, EXPERTS)
    logits = tl.load(
        logits_ptr + row * stride + index, mask=index < num_experts, other=float("-inf")
    ).to(tl.float32)
    exponentials = tl.exp(logits - tl.max(logits, axis=0))
    probabilities = exponentials / tl.sum(exponentials, axis=0)
    # Integers in the order of the floats (-0.0 is 0.0): below all of them there is room for -1.
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    keys = tl.where(index < num_experts, keys, -1)
    rank = tl.arange(0, RANKS)
    experts = tl.zeros((RANKS,), dtype=tl.int32)
    weights = tl.zeros((RANKS,), dtype=tl.float32)
    total = 0.0
    for chosen in tl.static_range(CHOSEN):
        expert = tl.argmax(keys, axis=0, tie_break_left=True).to(tl.int32)
        weight = tl.sum(tl.where(index == expert, probabilities, 0.0), axis=0)
        experts = tl.where(rank == chosen, expert, experts)
        weights = tl.where(rank == chosen, weight, weights)
        total += weight
        keys = tl.where(index == expert, -1, keys)
    if NORMALIZES:
        weights /= total
    tl.store(experts_ptr + row * CHOSEN + rank, experts, mask=rank < CHOSEN)
    tl.store(weights_ptr + row * CHOSEN + rank, weights, mask=rank < CHOSEN)
