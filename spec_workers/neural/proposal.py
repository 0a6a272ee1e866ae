"""A proposal that was read: its trees, and the guesses that are learned from later.

Legend: G trees, W nodes of a level, N nodes of all levels, V children of a row, C = (1 + N) V
candidates, R = 1 + N rows with guesses, the root's first, K candidates of a row, L depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of
from rollout.types import Batch, DraftTrees, EntryResult
from spec_workers.draft_tree import indices_within
from spec_workers.neural.shared_noise import Candidates


@dataclass(kw_only=True, slots=True, eq=False)
class Cases:
    """Guesses of rows along the path of the tokens emitted, and the token that came at each."""

    found: Candidates
    depths_R: NDArray[np.int64]
    came_R: NDArray[np.int64]


@dataclass(kw_only=True, slots=True, eq=False)
class Proposal:
    """See `TreeGrowth` for the first three arrays, `Candidates` for the others."""

    batch: Batch
    entries_G: list[int]  # of the batch
    topk: int  # W
    tokens_GC: NDArray[np.int32]
    probs_GC: NDArray[np.float32]  # negative: none
    candidates_GN: NDArray[np.int32]  # that were run; negative: none
    index_GRK: NDArray[np.int32]
    probs_GRK: NDArray[np.float32]
    ends_GRK: NDArray[np.float32]
    uniforms_GL: NDArray[np.float64]  # of each depth
    is_greedy_G: NDArray[np.bool_] | None  # None: none is

    @property
    def num_nodes(self) -> int:
        """Nodes that were run."""
        return int((self.candidates_GN >= 0).sum())

    @property
    def num_levels(self) -> int:
        """Levels that had nodes."""
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

    def followed(self, results: list[EntryResult]) -> Cases | None:
        """The guesses along the path of the tokens emitted; None: there were none."""
        parents_GN = np.where(self.candidates_GN < 0, -1, self.candidates_GN // self._children)
        tokens_GN = np.take_along_axis(self.tokens_GC, np.maximum(self.candidates_GN, 0), axis=1)
        trees: list[int] = []
        rows: list[int] = []
        tokens: list[int] = []
        for tree, b in enumerate(self.entries_G):
            row, first = 0, 0
            own = list(zip(parents_GN[tree].tolist(), tokens_GN[tree].tolist(), strict=True))
            for token in results[b].token_ids:
                trees.append(tree)
                rows.append(row)
                tokens.append(token)
                level = own[first : first + self.topk]
                if (row, token) not in level:
                    break
                row, first = 1 + first + level.index((row, token)), first + self.topk
        if not rows:
            return None
        return self._cases(np.array(trees), np.array(rows), np.array(tokens))

    def _cases(
        self, trees_R: NDArray[np.int64], rows_R: NDArray[np.int64], came_R: NDArray[np.int64]
    ) -> Cases:
        depths_R = np.where(rows_R == 0, 0, 1 + (rows_R - 1) // self.topk)
        found = Candidates(
            index_RC=self.index_GRK[trees_R, rows_R],
            probs_RC=self.probs_GRK[trees_R, rows_R],
            ends_RC=self.ends_GRK[trees_R, rows_R],
            uniforms_R=self.uniforms_GL[trees_R, depths_R],
            is_greedy_R=None if self.is_greedy_G is None else self.is_greedy_G[trees_R],
        )
        return Cases(found=found, depths_R=depths_R, came_R=came_R)
