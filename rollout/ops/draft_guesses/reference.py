"""Guesses by torch's own ops.

Legend: C candidates; see `draft_guesses`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rollout.ops.draft_guesses import GuessInputs

CANDIDATES = 32  # of a row; the tokens beyond are hardly ever worth a node
NEAR_SHARE = 0.25  # of a guess that counts the token's part of what is near


def draft_guesses(
    logits_RD: torch.Tensor,
    inputs: GuessInputs,
    trees_R: torch.Tensor,
    level: int | torch.Tensor,
    token_ids_D: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    probs_RC, index_RC, ends_RD = candidates(logits_RD, inputs, trees_R, count)
    ends_RC = ends_RD.gather(1, index_RC)

    noise_R1 = inputs.uniforms_PL[trees_R, level][:, None]
    near_R1 = inputs.near_P[trees_R][:, None]
    low_R1, high_R1 = (noise_R1 - near_R1).clamp(min=0), (noise_R1 + near_R1).clamp(max=1)
    overlap_RC = torch.minimum(ends_RC, high_R1) - torch.maximum(ends_RC - probs_RC, low_R1)
    near_RC = overlap_RC.clamp(min=0) / (high_R1 - low_R1)
    guesses_RC = probs_RC + NEAR_SHARE * (near_RC - probs_RC)

    probs_RW, best_RW = guesses_RC.topk(count, dim=1)
    tokens_RW = index_RC.gather(1, best_RW)
    if token_ids_D is not None:
        tokens_RW = token_ids_D[tokens_RW]
    return tokens_RW, (probs_RW * inputs.ratios_L[level][..., None]).clamp(max=1)


def candidates(
    logits_RD: torch.Tensor, inputs: GuessInputs, trees_R: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most probable tokens' probabilities and numbers [R, C], and the sums of all tokens'
    probabilities up to each, itself included, [R, D]."""
    temperature_R1 = inputs.temperature_P[trees_R][:, None]
    probs_RD = torch.softmax(logits_RD.float() / temperature_R1, dim=1)
    # CUDA's scan of one row, unlike that of several, may round differently from call to call.
    is_alone = probs_RD.is_cuda and len(probs_RD) == 1
    rows_RD = probs_RD.expand(2, -1) if is_alone else probs_RD
    ends_RD = rows_RD.cumsum(dim=1)[: len(probs_RD)]
    probs_RC, index_RC = probs_RD.topk(min(max(CANDIDATES, count), probs_RD.shape[1]), dim=1)
    return probs_RC, index_RC, ends_RD
