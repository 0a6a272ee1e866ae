"""Acceptance on the device: the draft nodes that the target's samples confirm.

Legend: B entries, N draft nodes, R sampled rows, D places of a path, at most 63.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.tree_accept import reference


def accept(
    sampled_R: torch.Tensor,
    row_offsets_B1: torch.Tensor,
    tokens_N: torch.Tensor,
    parents_N: torch.Tensor,
    masks_N: torch.Tensor,
    node_offsets_B1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk each entry's tree from the root along the children that equal the target's samples.

    The first of equal siblings counts. A sample below zero, which marks a row without a
    distribution, equals none.

    Args:
        sampled_R: int64, the target's sample at each entry's root, then at its nodes.
        row_offsets_B1: int32; entry b owns rows [offsets[b], offsets[b + 1]): one more than it has
            nodes, or none where it does not sample, and then no nodes either.
        tokens_N, parents_N, masks_N, node_offsets_B1: as types.DraftTrees, int32 and int64.

    Returns int32 paths_BD, tree nodes in path order, zeros after them; int32 lengths_B. An entry
    that samples emits one token more than its path is long.
    """
    arguments = (sampled_R, row_offsets_B1, tokens_N, parents_N, masks_N, node_offsets_B1)
    if gpu.runs_on(sampled_R.device):
        from rollout.ops.tree_accept import triton

        return triton.accept(*arguments)
    return reference.accept(*arguments)
