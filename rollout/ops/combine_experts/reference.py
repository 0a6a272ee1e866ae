"""The sum of a row's experts in plain torch.

Row-invariant: products and sums are separate operations that round every element alike at any
position. torch's sigmoid does not: it computes the last few elements in another way. Its softmax
works row by row, and the softmax of (gate, 0) is the sigmoid of the gate.
"""

from __future__ import annotations

import torch


def combine_experts(
    outputs_TXE: torch.Tensor,
    weights_TX: torch.Tensor,
    shared_TE: torch.Tensor | None,
    shared_gate_T: torch.Tensor | None,
) -> torch.Tensor:
    rows, ranks, hidden = outputs_TXE.shape
    total_TE = torch.zeros(rows, hidden, device=outputs_TXE.device)
    for rank in range(ranks):
        total_TE += outputs_TXE[:, rank].float() * weights_TX[:, rank, None]
    if shared_TE is not None and shared_gate_T is None:
        total_TE += shared_TE.float()
    elif shared_TE is not None and shared_gate_T is not None:
        gate_T = shared_gate_T.float()
        open_T2 = torch.stack([gate_T, torch.zeros_like(gate_T)], dim=1).softmax(dim=1)
        total_TE += shared_TE.float() * open_T2[:, :1]
    return total_TE.to(outputs_TXE.dtype)
