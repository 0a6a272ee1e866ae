"""Trees grown by torch's own ops, on any device, and chosen by NumPy's.

Legend: see `rollout.ops.tree_growth`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of, ranges
from rollout.ops.tree_growth.arrays import TreeArrays

NONE = -1.0  # the probability of what is no candidate


def add(arrays: TreeArrays, level: int, tokens_GFW: torch.Tensor, probs_GFW: torch.Tensor) -> None:
    """Add the children of a level's rows, 0 for roots."""
    if level:
        probs_GFW = arrays.row_probs_GW[:, :, None] * probs_GFW
        is_row_GF = arrays.is_row_GW
    else:
        is_row_GF = arrays.sizes_G[:, None] > 0
    is_one_GFW = (probs_GFW >= arrays.floor_1) & is_row_GF[:, :, None]
    own = slice(arrays.first_candidate(level), arrays.first_candidate(level + 1))
    arrays.tokens_GC[:, own] = tokens_GFW.flatten(1)
    arrays.probs_GC[:, own] = probs_GFW.masked_fill(is_one_GFW.logical_not(), NONE).flatten(1)


def expand(arrays: TreeArrays, level: int) -> None:
    """Choose the nodes of a level, 1 for children of the roots, from the children added last."""
    width, first_node = arrays.topk, arrays.first_node(level)
    first, last = arrays.first_candidate(level - 1), arrays.first_candidate(level)
    own = slice(first_node, first_node + width)
    all_GC, device = arrays.probs_GC[:, :last], arrays.probs_GC.device
    probs_GW, chosen_GW = all_GC[:, first:].sort(dim=1, descending=True, stable=True)
    probs_GW, chosen_GW = probs_GW[:, :width], chosen_GW[:, :width] + first
    # Its rank among all candidates of the tree, of equals the older first.
    own_GW1, all_G1C = probs_GW[:, :, None], all_GC[:, None]
    is_older_GWC = torch.arange(last, device=device) < chosen_GW[..., None]
    is_before_GWC = (all_G1C > own_GW1) | ((all_G1C == own_GW1) & is_older_GWC)
    is_node_GW = (probs_GW >= 0) & (is_before_GWC.sum(2) < arrays.sizes_G[:, None] - 1)
    is_node_GW &= arrays.depths_G[:, None] > level

    if level > 1:
        parents_GW = first_node - width + (chosen_GW - first) // width
        above_GW = arrays.node_masks_GN.gather(1, parents_GW)
    else:
        parents_GW = torch.full_like(chosen_GW, -1)
        above_GW = torch.ones_like(chosen_GW)
    own_W = 1 << torch.arange(first_node + 1, first_node + 1 + width, device=device)
    is_none_GW = is_node_GW.logical_not()
    tokens_GW = arrays.tokens_GC.gather(1, chosen_GW).masked_fill(is_none_GW, 0)
    arrays.node_tokens_GN[:, own] = tokens_GW
    arrays.node_parents_GN[:, own] = parents_GW
    arrays.node_masks_GN[:, own] = above_GW.masked_fill(is_none_GW, 1) | own_W
    arrays.is_node_GN[:, own] = is_node_GW
    arrays.node_candidates_GN[:, own] = chosen_GW.masked_fill(is_none_GW, -1)
    arrays.row_probs_GW[:] = probs_GW
    arrays.is_row_GW[:] = is_node_GW


def choose_nodes(
    tokens_GC: NDArray[np.int32],
    probs_GC: NDArray[np.float32],
    candidates_GN: NDArray[np.int32],
    sizes_G: NDArray[np.int64],
    topk: int,
) -> tuple[NDArray[Any], ...]:
    """See `rollout.ops.tree_growth.ChosenNodes`."""
    is_one_GC = probs_GC >= 0
    trees_C, columns_C = np.nonzero(is_one_GC)
    probs_C = probs_GC[is_one_GC]
    order = np.lexsort((-probs_C, trees_C))
    counts_G = np.bincount(trees_C, minlength=len(sizes_G))
    ranks_C = np.empty(len(order), dtype=np.int64)
    ranks_C[order] = ranges(np.zeros(len(counts_G), dtype=np.int64), counts_G)
    chosen = order[ranks_C[order] < sizes_G[trees_C[order]]]
    numbers_C = ranks_C + 1  # of a tree's nodes

    rows_C = columns_C // topk  # whose children they are
    nodes_C = np.maximum(rows_C - 1, 0)
    # Without a level there are no nodes, and all candidates are children of roots.
    above_C = candidates_GN[trees_C, nodes_C] if rows_C.any() else nodes_C
    index_GC = is_one_GC.cumsum().reshape(is_one_GC.shape) - 1
    parents_C = np.where(rows_C == 0, -1, index_GC[trees_C, above_C])
    depths = np.where(rows_C == 0, 1, 2 + nodes_C // topk)[chosen]
    masks_C = np.ones(len(numbers_C), dtype=np.uint64)
    for depth in range(1, int(depths.max(initial=0)) + 1):
        level = chosen[depths == depth]
        above, bits = parents_C[level], numbers_C[level].astype(np.uint64)
        root = np.uint64(1)
        masks_C[level] = np.where(above < 0, root, masks_C[above]) | np.uint64(1) << bits
    parents_C = np.where(parents_C < 0, 0, numbers_C[parents_C])
    return (
        offsets_of(np.bincount(trees_C[chosen], minlength=len(sizes_G))),
        tokens_GC[is_one_GC][chosen].astype(np.int32),
        parents_C[chosen].astype(np.int32),
        depths.astype(np.int32),
        masks_C[chosen],
        probs_C[chosen],
    )
