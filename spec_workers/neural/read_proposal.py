"""A proposal that was read from a device: its trees, and what is learned from them later.

Legend: G trees, W nodes of a level, N nodes of all levels, V children of a row, C = (1 + N) V
candidates, R = 1 + N rows with guesses, the root's first, K candidates of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.ops.uniforms.reference import noise
from rollout.types import Batch, DraftTrees, EntryResult
from spec_workers.neural.guesses import Cases, Guesser
from spec_workers.neural.kept_trees import kept_trees
from spec_workers.neural.shared_noise import Candidates


@dataclass(kw_only=True, slots=True, eq=False)
class ReadProposal:
    """See `DeviceGrowth` for the first three, `DeviceGuessed` for the others. A `Guesses`."""

    batch: Batch
    entries_G: list[int]  # of the batch
    guesser: Guesser
    topk: int  # W
    tokens_GC: NDArray[np.int32]
    probs_GC: NDArray[np.float32]  # negative: none
    candidates_GN: NDArray[np.int32]  # that were run; negative: none
    index_GRK: NDArray[np.int32]
    probs_GRK: NDArray[np.float32]
    ends_GRK: NDArray[np.float32]

    @property
    def num_nodes(self) -> int:
        return int((self.candidates_GN >= 0).sum())

    @property
    def num_levels(self) -> int:
        """That had nodes."""
        # Those that are nodes come first in a level.
        return int((self.candidates_GN[:, :: self.topk] >= 0).any(axis=0).sum())

    @property
    def _children(self) -> int:
        """V."""
        return self.tokens_GC.shape[1] // (1 + self.candidates_GN.shape[1])

    def trees(self, sizes_G: NDArray[np.int64], source: int) -> DraftTrees:
        """See `TreeGrowth.finish`."""
        is_one_GC = self.probs_GC >= 0
        trees_C, places_C = np.nonzero(is_one_GC)
        rows_C = places_C // self._children  # whose children they are
        of_root_C = rows_C == 0
        nodes_C = np.maximum(rows_C - 1, 0)
        # Without a level there are no nodes, and nobody's children but the roots'.
        above_C = self.candidates_GN[trees_C, nodes_C] if rows_C.any() else nodes_C
        numbers_GC = is_one_GC.cumsum().reshape(is_one_GC.shape) - 1
        return kept_trees(
            sizes_G,
            trees_C=trees_C,
            parents_C=np.where(of_root_C, -1, numbers_GC[trees_C, above_C]),
            tokens_C=self.tokens_GC[is_one_GC],
            depths_C=np.where(of_root_C, 1, 2 + nodes_C // self.topk),
            probs_C=self.probs_GC[is_one_GC],
            source=source,
        )

    def followed(self, results: list[EntryResult]) -> tuple[Cases, list[int]] | None:
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
        return (self._cases(np.array(trees), np.array(rows)), tokens) if rows else None

    def _cases(self, trees_R: NDArray[np.int64], rows_R: NDArray[np.int64]) -> Cases:
        entries = [self.batch.entries[self.entries_G[tree]] for tree in trees_R.tolist()]
        depths_R = np.where(rows_R == 0, 0, 1 + (rows_R - 1) // self.topk)
        # Without those that the step has emitted since.
        ends_R = np.array([entry.end for entry in entries], dtype=np.int64)
        seeds_R = np.array([entry.request.seed for entry in entries], dtype=np.uint64)
        temperatures = [entry.request.params.temperature for entry in entries]
        found = Candidates(
            index_RC=self.index_GRK[trees_R, rows_R].astype(np.int64),
            probs_RC=self.probs_GRK[trees_R, rows_R],
            ends_RC=self.ends_GRK[trees_R, rows_R],
            uniforms_R=noise(seeds_R, ends_R + depths_R),
            is_greedy_R=np.array(temperatures) == 0,
        )
        return self.guesser.cases(found, depths_R)
