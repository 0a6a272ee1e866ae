"""Tree acceptance in plain Python, one entry and one node at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from rollout.types import MAX_TREE_NODES


def walk(tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Walk one draft tree.

    Args:
        tokens: of draft node j, which is tree node j + 1.
        parents: its parent in tree numbering (0 is the root); parents come before children.
        sampled: the target's sample at each tree node, the root first: one more than drafts.

    Returns the accepted tree nodes in path order. The tokens emitted are ``sampled[0]`` and then
    ``sampled[node]`` for each of them. Of equal siblings the first counts.
    """
    path: list[int] = []
    node = 0
    for child, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        if parent == node and token == sampled[node]:
            path.append(child)
            node = child
    return path


def accept(
    sampled_R: torch.Tensor,
    row_offsets_B1: torch.Tensor,
    tokens_N: torch.Tensor,
    parents_N: torch.Tensor,
    masks_N: torch.Tensor,
    node_offsets_B1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents say all there is to know; masks are for those who look at all nodes at once."""
    sampled, tokens, parents = sampled_R.tolist(), tokens_N.tolist(), parents_N.tolist()
    rows, nodes = pairwise(row_offsets_B1.tolist()), pairwise(node_offsets_B1.tolist())
    paths_BD = np.zeros((len(row_offsets_B1) - 1, MAX_TREE_NODES - 1), dtype=np.int32)
    lengths_B = np.zeros(len(paths_BD), dtype=np.int32)
    for b, (own_rows, own_nodes) in enumerate(zip(rows, nodes, strict=True)):
        own = slice(*own_nodes)
        path = walk(tokens[own], parents[own], sampled[slice(*own_rows)])
        paths_BD[b, : len(path)] = path
        lengths_B[b] = len(path)
    device = sampled_R.device
    return torch.from_numpy(paths_BD).to(device), torch.from_numpy(lengths_B).to(device)
