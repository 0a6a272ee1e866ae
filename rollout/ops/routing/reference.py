"""Top-k routing in plain torch (Shazeer et al. 2017, Outrageously Large Neural Networks).

Row-invariant: torch's softmax goes row by row, and what is chosen is added up rank by rank.
"""

from __future__ import annotations

import torch


def route(
    logits_TN: torch.Tensor, experts_per_row: int, normalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TN = logits_TN.float()
    # By logits: they tell apart what is equal as a probability. topk breaks ties as it likes.
    order_TN = logits_TN.sort(dim=-1, descending=True, stable=True).indices
    experts_TX = order_TN[:, :experts_per_row]
    weights_TX = logits_TN.softmax(dim=-1).gather(1, experts_TX)
    if normalizes:
        total_T = weights_TX[:, 0]
        for rank in range(1, experts_per_row):
            total_T = total_T + weights_TX[:, rank]
        weights_TX = weights_TX / total_T[:, None]
    return experts_TX.to(torch.int32), weights_TX
