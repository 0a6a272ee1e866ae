"""Guesses on a GPU: torch's softmax, sums and candidates, and all that follows in one kernel.

Legend: C candidates; see `draft_guesses`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from rollout.ops.draft_guesses.reference import NEAR_SHARE, candidates

if TYPE_CHECKING:
    from rollout.ops.draft_guesses import GuessInputs


def draft_guesses(
    logits_RD: torch.Tensor,
    inputs: GuessInputs,
    trees_R: torch.Tensor,
    level: int | torch.Tensor,
    token_ids_D: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    probs_RC, index_RC, ends_RD = candidates(logits_RD, inputs, trees_R, count)
    rows, found = probs_RC.shape
    tokens_RW = torch.empty(rows, count, dtype=torch.int64, device=logits_RD.device)
    probs_RW = torch.empty(rows, count, dtype=torch.float32, device=logits_RD.device)
    if rows:
        levels_R = level if isinstance(level, torch.Tensor) else None
        _guess_kernel[(rows,)](
            probs_RC, index_RC, ends_RD, trees_R, levels_R, 0 if levels_R is not None else level,
            inputs.near_P, inputs.uniforms_PL, inputs.ratios_L, token_ids_D, tokens_RW, probs_RW,
            ends_RD.stride(0), trees_R.stride(0), inputs.uniforms_PL.shape[1],
            HAS_LEVELS=levels_R is not None, HAS_IDS=token_ids_D is not None, FOUND=found,
            COUNT=count, NEAR_SHARE=NEAR_SHARE, BLOCK=triton.next_power_of_2(found), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return tokens_RW, probs_RW


@triton.jit(do_not_specialize=["level"])
def _guess_kernel(
    probs_ptr, index_ptr, ends_ptr, trees_ptr, levels_ptr, level, near_ptr, uniforms_ptr,
    ratios_ptr, ids_ptr, out_tokens_ptr, out_probs_ptr, ends_stride, trees_stride, num_levels,
    HAS_LEVELS: tl.constexpr, HAS_IDS: tl.constexpr, FOUND: tl.constexpr, COUNT: tl.constexpr,
    NEAR_SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_one = column < FOUND
    prob = tl.load(probs_ptr + row * FOUND + column, mask=is_one, other=0.0)
    index = tl.load(index_ptr + row * FOUND + column, mask=is_one, other=0)
    end = tl.load(ends_ptr + row * ends_stride + index, mask=is_one, other=0.0)
    tree = tl.load(trees_ptr + row * trees_stride)
    if HAS_LEVELS:
        level = tl.load(levels_ptr + row)
    noise = tl.load(uniforms_ptr + tree * num_levels + level)
    reach = tl.load(near_ptr + tree)
    low, high = tl.maximum(noise - reach, 0.0), tl.minimum(noise + reach, 1.0)
    overlap = tl.minimum(end, high) - tl.maximum(end - prob, low)
    near = tl.maximum(overlap, 0.0) / (high - low)
    guess = prob + NEAR_SHARE * (near - prob)
    is_broken = tl.max((prob != prob).to(tl.int32), axis=0) > 0
    left = tl.where(is_one & (guess == guess), guess, -1.0)
    ratio = tl.load(ratios_ptr + level)
    for w in range(COUNT):
        best = tl.max(left, axis=0)
        chosen = tl.min(tl.where(left == best, column, BLOCK), axis=0)
        left = tl.where(column == chosen, -2.0, left)
        token = tl.load(index_ptr + row * FOUND + tl.minimum(chosen, FOUND - 1))
        if HAS_IDS:
            token = tl.load(ids_ptr + token)
        value = tl.where(is_broken, float("nan"), tl.minimum(best * ratio, 1.0))
        tl.store(out_tokens_ptr + row * COUNT + w, token)
        tl.store(out_probs_ptr + row * COUNT + w, value)
