"""A proposal that was read: its trees, and the guesses that are learned from later.

Legend: G trees, W nodes of a level, N nodes of all levels, V children of a row, C = (1 + N) V
candidates, the root's first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of
from rollout.types import Batch, DraftTrees, EntryResult
from spec_workers.draft_tree import indices_within


@dataclass(kw_only=True, slots=True, eq=False)
class Proposal:
    """See `TreeGrowth`."""

    batch: Batch
    entries_G: list[int]  # of the batch
    topk: int  # W
    tokens_GC: NDArray[np.int32]
    probs_GC: NDArray[np.float32]  # negative: none
    candidates_GN: NDArray[np.int32]  # that were run; negative: none

    @property
    def num_nodes(self) -> int:
        return int((self.candidates_GN >= 0).sum())

    @property
    def num_levels(self) -> int:
        # Those that are nodes come first in a level.
        return int((self.candidates_GN[:, :: self.topk] >= 0).any(axis=0).sum())

    @property
    def _children(self) -> int:
        """V: candidates per node."""
        return self.tokens_GC.shape[1] // (1 + self.candidates_GN.shape[1])

    def trees(self, sizes_G: NDArray[np.int64], source: int) -> DraftTrees:
        """The most probable candidates of each tree, at most ``sizes_G``; of equals the older."""
        is_one_GC = self.probs_GC >= 0
        trees_C, columns_C = np.nonzero(is_one_GC)
        probs_C = self.probs_GC[is_one_GC]
        order = np.lexsort((-probs_C, trees_C))
        ranks_C = np.empty(len(order), dtype=np.int64)
        ranks_C[order] = indices_within(np.bincount(trees_C, minlength=len(sizes_G)))
        chosen = order[ranks_C[order] < sizes_G[trees_C[order]]]
        numbers_C = ranks_C + 1  # of a tree's nodes

        rows_C = columns_C // self._children  # whose children they are
        nodes_C = np.maximum(rows_C - 1, 0)
        # Without a level there are no nodes, and all candidates are children of roots.
        above_C = self.candidates_GN[trees_C, nodes_C] if rows_C.any() else nodes_C
        index_GC = is_one_GC.cumsum().reshape(is_one_GC.shape) - 1
        parents_C = np.where(rows_C == 0, -1, index_GC[trees_C, above_C])
        depths = np.where(rows_C == 0, 1, 2 + nodes_C // self.topk)[chosen]
        masks_C = np.ones(len(numbers_C), dtype=np.uint64)
        for depth in range(1, int(depths.max(initial=0)) + 1):
            level = chosen[depths == depth]
            above, bits = parents_C[level], numbers_C[level].astype(np.uint64)
            root = np.uint64(1)
            masks_C[level] = np.where(above < 0, root, masks_C[above]) | np.uint64(1) << bits
        parents_C = np.where(parents_C < 0, 0, numbers_C[parents_C])
        return DraftTrees(
            offsets_B1=offsets_of(np.bincount(trees_C[chosen], minlength=len(sizes_G))),
            tokens_N=self.tokens_GC[is_one_GC][chosen].astype(np.int32),
            parents_N=parents_C[chosen].astype(np.int32),
            depths_N=depths.astype(np.int32),
            masks_N=masks_C[chosen],
            probs_N=probs_C[chosen],
            sources_N=np.full(len(chosen), source, dtype=np.uint8),
        )

    def followed(self, results: list[EntryResult]) -> Iterator[tuple[int, float, bool]]:
        """The rows along the path of the tokens emitted: a row's level, the probability of its
        children, given the row, and whether one of them came."""
        children = self._children
        for tree, b in enumerate(self.entries_G):
            tokens_C, probs_C = self.tokens_GC[tree].tolist(), self.probs_GC[tree].tolist()
            nodes = {c: n for n, c in enumerate(self.candidates_GN[tree].tolist()) if c >= 0}
            row, before = 0, 1.0
            for level, token in enumerate(results[b].token_ids):
                columns = range(row * children, (row + 1) * children)
                own = [c for c in columns if probs_C[c] >= 0]
                came = [c for c in own if tokens_C[c] == token]
                yield level, sum(probs_C[c] for c in own) / before, bool(came)
                if not came or came[0] not in nodes:
                    break
                row, before = 1 + nodes[came[0]], probs_C[came[0]]
