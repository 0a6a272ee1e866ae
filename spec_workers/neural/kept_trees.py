"""Which candidates of growing trees are kept, and the trees those make.

Legend: G trees, C candidates of all of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.types import DraftTrees
from spec_workers.draft_tree import offsets_of, places_within


def order_of(trees_C: NDArray[np.int64], probs_C: NDArray[np.float32]) -> NDArray[np.int64]:
    """Candidates by tree, the most probable first, of equals the first."""
    return np.lexsort((-probs_C, trees_C))


def ranks_of(
    trees_C: NDArray[np.int64], probs_C: NDArray[np.float32], num_trees: int
) -> NDArray[np.int64]:
    """The place of each candidate among those of its tree in that order."""
    order = order_of(trees_C, probs_C)
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = places_within(np.bincount(trees_C, minlength=num_trees))
    return ranks


def kept_trees(
    sizes_G: NDArray[np.int64],
    *,
    trees_C: NDArray[np.int64],
    parents_C: NDArray[np.int64],
    tokens_C: NDArray[np.integer],
    depths_C: NDArray[np.int64],
    probs_C: NDArray[np.float32],
    source: int,
) -> DraftTrees:
    """The most probable candidates of each tree, as many as it may keep.

    ``parents_C``: candidates, -1 for the root; none is less probable than its children, and of
    equals it is the first.
    """
    order = order_of(trees_C, probs_C)
    numbers_C = ranks_of(trees_C, probs_C, len(sizes_G)) + 1
    kept = order[numbers_C[order] <= sizes_G[trees_C[order]]]
    masks_C = np.ones(len(numbers_C), dtype=np.uint64)
    depths = depths_C[kept]
    for depth in range(1, int(depths.max(initial=0)) + 1):
        level = kept[depths == depth]
        above, bits = parents_C[level], numbers_C[level].astype(np.uint64)
        root = np.uint64(1)
        masks_C[level] = np.where(above < 0, root, masks_C[above]) | np.uint64(1) << bits
    counts_G = np.bincount(trees_C[kept], minlength=len(sizes_G))
    parents_C = np.where(parents_C < 0, 0, numbers_C[parents_C])
    return DraftTrees(
        offsets_B1=offsets_of(counts_G),
        tokens_N=tokens_C[kept].astype(np.int32),
        parents_N=parents_C[kept].astype(np.int32),
        depths_N=depths.astype(np.int32),
        masks_N=masks_C[kept],
        probs_N=probs_C[kept],
        sources_N=np.full(len(kept), source, dtype=np.uint8),
    )
