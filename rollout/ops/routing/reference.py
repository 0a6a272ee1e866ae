"""Top-k routing in plain torch (Shazeer et al. 2017, Outrageously Large Neural Networks).

Row-invariant: torch's softmax works row by row, and chosen weights are added rank by rank. torch's
sigmoid is not: it computes the last few elements in another way. The softmax of (x, 0) is the
sigmoid of x.
"""

from __future__ import annotations

import torch

from rollout.ops.routing.method import Groups

_NOT_ZERO = 1e-20  # added to a sum of weights, which sigmoids may make zero


def route(
    logits_TN: torch.Tensor,
    experts_per_row: int,
    normalizes: bool,
    groups: Groups,
    bias_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TN = logits_TN.float()
    # Softmax does not change the order; logits may differ where probabilities are equal.
    score_TN, order_by_TN = logits_TN.softmax(dim=-1), logits_TN
    if groups.sigmoid:
        score_TN = torch.stack([logits_TN, torch.zeros_like(logits_TN)], -1).softmax(-1)[..., 0]
        order_by_TN = score_TN if bias_N is None else score_TN + bias_N
    if groups.count > 1:
        order_by_TN = order_by_TN.masked_fill(_left_out(order_by_TN, groups), float("-inf"))
    # Sorted, because topk has no order of ties.
    experts_TX = _descending(order_by_TN)[:, :experts_per_row]
    weights_TX = score_TN.gather(1, experts_TX)
    if normalizes:
        total_T = weights_TX[:, 0]
        for rank in range(1, experts_per_row):
            total_T = total_T + weights_TX[:, rank]
        weights_TX = weights_TX / (total_T + _NOT_ZERO)[:, None]
    return experts_TX.to(torch.int32), weights_TX * groups.factor


def _left_out(order_by_TN: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Whether an expert is in none of the chosen groups, bool [T, N]."""
    members_TGM = order_by_TN.unflatten(1, (groups.count, -1)).sort(dim=-1, descending=True).values
    best_TG = members_TGM[..., 0]
    if groups.sigmoid:
        best_TG = best_TG + members_TGM[..., 1]
    left_out_TG = torch.ones_like(best_TG, dtype=torch.bool)
    left_out_TG.scatter_(1, _descending(best_TG)[:, : groups.chosen], False)
    return left_out_TG.repeat_interleave(members_TGM.shape[2], dim=1)


def _descending(values_TN: torch.Tensor) -> torch.Tensor:
    """Indices from the largest to the smallest, of equal ones the lower first."""
    return values_TN.sort(dim=-1, descending=True, stable=True).indices
