"""What training makes small: the distance of a draft's guesses from the target's own prediction.

Legend: S rows that guess, D draft vocabulary, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.packed_rows import PackedRows
from spec_workers.draft_training.soft_cross_entropy import SoftCrossEntropy

_ROWS_AT_ONCE = 128
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
    device = target_head_DE.device
    dtype = torch.float32
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    with torch.autocast(device.type, enabled=False):
        labels_SD = _labels(rows.final_SE(), target_head_DE, dtype)
        contains_V = draft.vocabulary.contains_V.to(device)
        reached_S = torch.ones(len(labels_SD), dtype=torch.bool, device=device)
        total = torch.zeros((), device=device)
        cross_entropies, agreement = [], []
        for step, hidden_SE in enumerate(hidden):
            reached_S &= contains_V[rows.guessed_tokens_S(step)] & rows.is_inside_S(step)
            chosen = reached_S.nonzero().flatten()
            weights = torch.full((len(chosen),), 1.0 / max(1, len(chosen)), device=device)
            mean, agreed = SoftCrossEntropy.apply(
                draft.head_input(hidden_SE[chosen]).float(),
                draft.lm_head.weight,
                labels_SD[rows.label_rows_S(step)[chosen]],
                weights,
                dtype,
            )
            total = total + STEP_DECAY**step * mean
            cross_entropies.append(float(mean.detach()))
            agreement.append(float(agreed))
    return UnrolledLoss(
        total=total / sum(STEP_DECAY**step for step in range(num_steps)),
        cross_entropies=cross_entropies,
        agreement=agreement,
        num_guesses=len(labels_SD),
    )


@torch.no_grad()
def _labels(
    final_SE: torch.Tensor, target_head_DE: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[S, D] probabilities, in the dtype of the products."""
    head_DE = target_head_DE.to(dtype)
    labels_SD = final_SE.new_empty((len(final_SE), len(head_DE)), dtype=dtype)
    for rows in torch.arange(len(final_SE)).split(_ROWS_AT_ONCE):
        labels_SD[rows] = (final_SE[rows].to(dtype) @ head_DE.T).float().softmax(1).to(dtype)
    return labels_SD
