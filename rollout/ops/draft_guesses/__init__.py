"""The likeliest tokens of a draft's rows, beside the noise that the target samples with.

Legend: P trees, L levels, R rows of logits, D draft vocabulary, W children.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.ops import gpu
from rollout.ops.draft_guesses import native, reference


@dataclass(frozen=True, slots=True, eq=False)
class GuessInputs:
    """The inputs of guesses beside logits: float32, on the logits' device."""

    temperature_P: torch.Tensor  # above 0
    near_P: torch.Tensor  # how far from the noise a token's interval is looked at
    uniforms_PL: torch.Tensor  # the noise of each position, in [0, 1)
    ratios_L: torch.Tensor  # accepted over claimed guesses of each level


def draft_guesses(
    logits_RD: torch.Tensor,
    inputs: GuessInputs,
    trees_R: torch.Tensor,
    level: int | torch.Tensor,
    token_ids_D: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The children of the rows, the most probable first. Nothing waits for a device.

    Args:
        logits_RD: any float dtype.
        trees_R: int64, each row's tree.
        level: of all rows, or int64 [R]; 0 for roots.
        token_ids_D: int64, the target's token of each of the draft's; None: the same.
        count: W, if there are so many tokens.

    Returns:
        Tokens of the target's vocabulary, int64 [R, W].
        Their probabilities, float32 [R, W]; NaN where logits are.
    """
    given = logits_RD, inputs, trees_R, level, token_ids_D, min(count, logits_RD.shape[1])
    if gpu.runs_on(logits_RD.device):
        from rollout.ops.draft_guesses import triton

        return triton.draft_guesses(*given)
    return (native if native.supports(logits_RD) else reference).draft_guesses(*given)
