"""What training makes small: the distance of a draft's guesses from the target's own prediction.

Legend: S rows that guess, D draft vocabulary, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.packed_rows import PackedRows

STEP_DECAY = 0.8
"""Of a step's weight to the one before: deeper guesses are reached less often (EAGLE-3's value)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrolledLoss:
    """``total``: to be minimised. The rest: what it is made of, per step."""

    total: torch.Tensor
    cross_entropies: list[float]  # nats, against the target's distribution
    agreement: list[float]  # share of guesses whose likeliest token is the target's
    num_guesses: int


def unrolled_loss(
    draft: TrainableDraft, rows: PackedRows, target_head_DE: torch.Tensor, num_steps: int
) -> UnrolledLoss:
    """Cross entropy with the target's distribution over the draft's vocabulary, renormalised.

    ``target_head_DE``: the target's head at the draft's tokens. A guess is left out where a token
    that leads to it, or the one that came, is none of the draft's: it would not have been reached.
    """
    hidden = draft.unroll(rows, num_steps)
    with torch.no_grad():
        labels_SD = torch.nn.functional.linear(rows.final_SE(), target_head_DE).float()
        labels_SD = labels_SD.softmax(-1)
    contains_V = draft.vocabulary.contains_V.to(labels_SD.device)
    reached_S = torch.ones(len(labels_SD), dtype=torch.bool, device=labels_SD.device)
    total = labels_SD.new_zeros(())
    cross_entropies, agreement = [], []
    for step, hidden_SE in enumerate(hidden):
        reached_S = reached_S & contains_V[rows.guessed_tokens_S(step)] & rows.is_inside_S(step)
        logprobs_SD = draft.logits(hidden_SE).float().log_softmax(-1)
        label_SD = labels_SD[rows.label_rows_S(step)] if step else labels_SD
        each_S = -(label_SD * logprobs_SD).sum(-1)
        count = reached_S.sum().clamp(min=1)
        mean = torch.where(reached_S, each_S, 0.0).sum() / count
        total = total + STEP_DECAY**step * mean
        same_S = logprobs_SD.detach().argmax(-1) == label_SD.argmax(-1)
        cross_entropies.append(float(mean.detach()))
        agreement.append(float((same_S & reached_S).sum() / count))
    weights = sum(STEP_DECAY**step for step in range(num_steps))
    return UnrolledLoss(
        total=total / weights,
        cross_entropies=cross_entropies,
        agreement=agreement,
        num_guesses=len(labels_SD),
    )
