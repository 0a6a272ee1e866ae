"""The loss of draft training: cross entropy with the target's distribution, over unrolled steps.

Logits of all rows would be by far the largest tensor of training, and only their gradient is
needed. So logits are computed, compared and turned into gradients a few rows at a time.

Legend: S rows that guess, D draft vocabulary, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.packed_rows import PackedRows

_ROWS_AT_ONCE = 128


class SoftCrossEntropy(torch.autograd.Function):
    """``apply(hidden_SE, head_DE, labels_SD, weights_S, dtype)`` returns two scalars.

    The first is the sum over rows of weight times cross entropy in nats. The second, without a
    gradient, is the sum of the weights of rows whose most likely token is the label's.
    ``labels_SD``: probabilities. ``dtype``: of the matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SE: torch.Tensor,
        head_DE: torch.Tensor,
        labels_SD: torch.Tensor,
        weights_S: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states_SE, table_DE = hidden_SE.to(dtype), head_DE.to(dtype)
        hidden_grad_SE = torch.empty_like(hidden_SE)
        head_grad_DE = torch.zeros_like(head_DE)
        total = hidden_SE.new_zeros((), dtype=torch.float32)
        agreed = hidden_SE.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden_SE), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            logits_RD = (states_SE[rows] @ table_DE.T).float()
            labels_RD, weights_R = labels_SD[rows].float(), weights_S[rows]
            agreed += weights_R[logits_RD.argmax(1) == labels_RD.argmax(1)].sum()
            lse_R1 = logits_RD.logsumexp(1, keepdim=True)
            each_R = lse_R1[:, 0] - (labels_RD * logits_RD).sum(1)
            total += (each_R * weights_R).sum()
            grad_RD = logits_RD.sub_(lse_R1).exp_().sub_(labels_RD).mul_(weights_R[:, None])
            grad_RD = grad_RD.to(dtype)
            hidden_grad_SE[rows] = grad_RD @ table_DE
            head_grad_DE += grad_RD.T @ states_SE[rows]
        ctx.save_for_backward(hidden_grad_SE, head_grad_DE)
        ctx.mark_non_differentiable(agreed)
        return total, agreed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The stored gradients, scaled by that of the first sum."""
        hidden_grad_SE, head_grad_DE = ctx.saved_tensors
        return hidden_grad_SE * grads[0], head_grad_DE * grads[0], None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrolledLoss:
    total: torch.Tensor  # to minimise
    cross_entropies: list[float]  # nats, against the target's distribution
    agreement: list[float]  # share of guesses whose most likely token is the target's


def unrolled_loss(
    draft: TrainableDraft, rows: PackedRows, target_head_DE: torch.Tensor, num_steps: int
) -> UnrolledLoss:
    """Cross entropy with the target's distribution, renormalised over the draft's vocabulary.

    A guess is left out if its token, or one that leads to it, is not in the draft's vocabulary,
    since it could not be reached. ``target_head_DE``: the target's head at the draft's tokens.
    """
    anchors_A = draft.anchors_A(rows)
    hidden = draft.unroll(rows, num_steps, anchors_A)
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
            chosen = reached_S[anchors_A].nonzero().flatten()
            weights = torch.full((len(chosen),), 1.0 / max(1, len(chosen)), device=device)
            mean, agreed = SoftCrossEntropy.apply(
                draft.norm(hidden_SE[chosen]).float(),
                draft.lm_head.weight,
                labels_SD[rows.label_rows_S(step)[anchors_A[chosen]]],
                weights,
                dtype,
            )
            total = total + draft.step_decay**step * mean
            cross_entropies.append(float(mean.detach()))
            agreement.append(float(agreed))
    return UnrolledLoss(
        total=total / sum(draft.step_decay**step for step in range(len(hidden))),
        cross_entropies=cross_entropies,
        agreement=agreement,
    )


@torch.no_grad()
def _labels(
    final_SE: torch.Tensor, target_head_DE: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The target's probabilities [S, D], in the dtype of the matrix products."""
    head_DE = target_head_DE.to(dtype)
    labels_SD = final_SE.new_empty((len(final_SE), len(head_DE)), dtype=dtype)
    for rows in torch.arange(len(final_SE)).split(_ROWS_AT_ONCE):
        labels_SD[rows] = (final_SE[rows].to(dtype) @ head_DE.T).float().softmax(1).to(dtype)
    return labels_SD
