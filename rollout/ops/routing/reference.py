"""Top-k routing in plain torch (Shazeer et al. 2017, Outrageously Large Neural Networks).

Row-invariant: torch's softmax works row by row, and chosen probabilities are added rank by rank.
"""

from __future__ import annotations

import torch


def route(
    logits_TN: torch.Tensor, experts_per_row: int, normalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TN = logits_TN.float()
    # Sorted by logits, which may differ where probabilities are equal; topk has no order of ties.
    order_TN = logits_TN.sort(dim=-1, descending=True, stable=True).indices
    experts_TX = order_TN[:, :experts_per_row]
    weights_TX = logits_TN.softmax(dim=-1).gather(1, experts_TX)
    if normalizes:
        total_T = weights_TX[:, 0]
        for rank in range(1, experts_per_row):
            total_T = total_T + weights_TX[:, rank]
        weights_TX = weights_TX / total_T[:, None]
    return experts_TX.to(torch.int32), weights_TX
