"""A proposal that was read: its trees, and the guesses that are learned from later.

Legend: G trees, W nodes of a level and children of a row, N nodes of all levels, C = (1 + N) W
candidates, the root's first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.ops.tree_growth import choose_nodes
from rollout.types import Batch, DraftTrees, EntryResult


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

    def trees(self, sizes_G: NDArray[np.int64], source: int) -> DraftTrees:
        """The most probable candidates of each tree, at most ``sizes_G``; of equals the older."""
        nodes = choose_nodes(self.tokens_GC, self.probs_GC, self.candidates_GN, sizes_G, self.topk)
        return DraftTrees(
            offsets_B1=nodes.offsets_G1,
            tokens_N=nodes.tokens_N,
            parents_N=nodes.parents_N,
            depths_N=nodes.depths_N,
            masks_N=nodes.masks_N,
            probs_N=nodes.probs_N,
            sources_N=np.full(len(nodes.tokens_N), source, dtype=np.uint8),
        )

    def followed(self, results: list[EntryResult]) -> Iterator[tuple[int, float, bool]]:
        """The rows along the path of the tokens emitted: a row's level, the probability of its
        children, given the row, and whether one of them came."""
        children = self.topk
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
