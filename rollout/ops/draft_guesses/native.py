"""Guesses on the CPU. Sums have another order than the reference's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollout.ops.draft_guesses.reference import CANDIDATES, NEAR_SHARE
from rollout.ops.extension import DTYPE_CODES, cpu, supports

if TYPE_CHECKING:
    from rollout.ops.draft_guesses import GuessInputs

__all__ = ["draft_guesses", "supports"]


def draft_guesses(
    logits_RD: torch.Tensor,
    inputs: GuessInputs,
    trees_R: torch.Tensor,
    level: int | torch.Tensor,
    token_ids_D: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    trees_R = trees_R.contiguous()
    levels_R, of_all = None, 0
    if isinstance(level, torch.Tensor):
        levels_R = level.contiguous()
    else:
        of_all = level
    tokens_RW = torch.empty(len(logits_RD), count, dtype=torch.int64)
    probs_RW = torch.empty(len(logits_RD), count, dtype=torch.float32)
    cpu.guesses(
        DTYPE_CODES[logits_RD.dtype],
        logits_RD.data_ptr(),
        logits_RD.shape,
        logits_RD.stride(),
        trees_R.data_ptr(),
        0 if levels_R is None else levels_R.data_ptr(),
        of_all,
        inputs.temperature_P.data_ptr(),
        inputs.near_P.data_ptr(),
        inputs.uniforms_PL.data_ptr(),
        inputs.uniforms_PL.shape[1],
        inputs.ratios_L.data_ptr(),
        0 if token_ids_D is None else token_ids_D.data_ptr(),
        max(CANDIDATES, count),
        count,
        NEAR_SHARE,
        tokens_RW.data_ptr(),
        probs_RW.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens_RW, probs_RW
