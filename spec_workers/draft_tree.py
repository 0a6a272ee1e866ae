"""Makes DraftTrees: without draft nodes, of a batch from those of some entries, and cut ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of, ranges
from rollout.types import DraftTrees

_NO_NODES: dict[str, NDArray] = {
    "tokens_N": np.zeros(0, dtype=np.int32),
    "parents_N": np.zeros(0, dtype=np.int32),
    "depths_N": np.zeros(0, dtype=np.int32),
    "masks_N": np.zeros(0, dtype=np.uint64),
    "probs_N": np.zeros(0, dtype=np.float32),
    "sources_N": np.zeros(0, dtype=np.uint8),
}


def only_roots(num_entries: int) -> DraftTrees:
    """Trees without draft nodes: a step with them is plain decoding."""
    return DraftTrees(offsets_B1=np.zeros(num_entries + 1, dtype=np.int64), **_NO_NODES)


def spread(trees: DraftTrees, entries: Sequence[int], num_entries: int) -> DraftTrees:
    """The trees of some entries of a batch as those of the batch; ``entries`` ascends."""
    if len(entries) == num_entries:
        return trees
    counts = np.zeros(num_entries + 1, dtype=np.int64)
    counts[np.array(entries, dtype=np.intp) + 1] = np.diff(trees.offsets_B1)
    return replace(trees, offsets_B1=np.cumsum(counts))


def first_nodes(trees: DraftTrees, counts_B: NDArray[np.int64]) -> tuple[DraftTrees, NDArray]:
    """The first so many nodes of each entry, and which of all nodes those are (bool, (N,)).

    Parents come before their children, so what is left are trees.
    """
    sizes_B = np.diff(trees.offsets_B1)
    index_N = np.arange(trees.num_nodes) - np.repeat(trees.offsets_B1[:-1], sizes_B)
    is_first_N = index_N < np.repeat(counts_B, sizes_B)
    first = DraftTrees(
        offsets_B1=offsets_of(counts_B),
        tokens_N=trees.tokens_N[is_first_N],
        parents_N=trees.parents_N[is_first_N],
        depths_N=trees.depths_N[is_first_N],
        masks_N=trees.masks_N[is_first_N],
        probs_N=trees.probs_N[is_first_N],
        sources_N=trees.sources_N[is_first_N],
    )
    return first, is_first_N


def indices_within(lens_B: NDArray) -> NDArray[np.int64]:
    """The ranges 0, 1, ... of these lengths, one behind the other: int64 [sum of lens]."""
    return ranges(np.zeros(len(lens_B), dtype=np.int64), lens_B)
