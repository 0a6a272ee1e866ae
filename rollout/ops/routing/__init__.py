"""Top-k routing of rows to experts. T rows, N experts, X experts per row."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.routing import reference


def route(
    logits_TN: torch.Tensor, experts_per_row: int, normalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the largest logits and their probabilities: int32 and float32 [T, X].

    The largest first; of equal ones the lower index first. Probabilities are the float32 softmax
    over all N; with ``normalizes`` the chosen ones are scaled to add up to 1. A row's choice
    depends on that row alone. Rows with NaN get experts that exist.
    """
    if gpu.supports(logits_TN):
        from rollout.ops.routing import triton

        return triton.route(logits_TN, experts_per_row, normalizes)
    return reference.route(logits_TN, experts_per_row, normalizes)
