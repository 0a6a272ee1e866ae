"""Top-k routing of rows to experts. T rows, N experts, X experts per row."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.routing import reference
from rollout.ops.routing.method import PLAIN, Groups

__all__ = ["PLAIN", "Groups", "route"]


def route(
    logits_TN: torch.Tensor,
    experts_per_row: int,
    normalizes: bool,
    groups: Groups = PLAIN,
    bias_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the largest logits and their weights: int32 and float32 [T, X].

    The largest first; of equal ones the lower index first. Weights are the float32 softmax over all
    N; with ``normalizes`` the chosen ones are scaled to add up to 1. A row's choice depends on that
    row alone. Rows with NaN get experts that exist.

    ``groups`` changes that as it says. With ``bias_N``, float32, which needs ``groups.sigmoid``,
    scores plus bias decide the choice, but not the weights.
    """
    op = reference.route
    if gpu.supports(logits_TN):
        from rollout.ops.routing import triton

        op = triton.route
    return op(logits_TN, experts_per_row, normalizes, groups, bias_N)
