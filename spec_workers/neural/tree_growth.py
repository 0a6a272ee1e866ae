"""Draft trees grown level by level, the most probable nodes first.

EAGLE-2 (Li et al. 2024): the draft's nodes are worth the probability that all of their path is
accepted; of each level the most probable are expanded, and of all that were thought of the most
probable are kept. A node is never more probable than its parent, so what is kept are trees.

Legend: G trees, C candidates of all of them, F of the frontier, N nodes kept, W children of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types import DraftTrees
from spec_workers.draft_tree import places_within
from spec_workers.neural.kept_trees import kept_trees, ranks_of


@dataclass(kw_only=True, slots=True)
class Expansion:
    """Candidates to run through the draft: those of a tree side by side, trees ascending."""

    candidates_F: NDArray[np.int64]
    trees_F: NDArray[np.int64]
    parent_rows_F: NDArray[np.int64]  # in the expansion before; in the first one, the tree
    tokens_F: NDArray[np.int64]
    depths_F: NDArray[np.int64]
    trees_B: NDArray[np.int64]  # that have any
    counts_B: NDArray[np.int64]  # nodes of these run so far, the new ones included
    new_B: NDArray[np.int64]
    masks_N: NDArray[np.uint64]  # of nodes run so far, in the order they were run


class TreeGrowth:
    """The trees of G requests while they grow. Call `add`, then `expand` and `add` in turn."""

    def __init__(
        self,
        sizes_G: NDArray[np.int64],
        depths_G: NDArray[np.int64],
        *,
        topk: int,
        max_nodes: int,
        floor: float,
    ) -> None:
        """
        Args:
            sizes_G: most nodes each tree keeps.
            depths_G: how deep it may grow.
            topk: most children of a node, and most nodes of a level that are expanded.
            max_nodes: most nodes of a tree that are ever expanded.
            floor: nodes less probable than this are not thought of.
        """
        self._sizes_G = sizes_G
        self._max_depths_G = depths_G
        self._topk = topk
        self._floor = max(floor, float(np.finfo(np.float32).tiny))
        self._trees_C = np.zeros(0, dtype=np.int64)
        self._parents_C = np.zeros(0, dtype=np.int64)  # candidates; -1: the root
        self._tokens_C = np.zeros(0, dtype=np.int64)
        self._depths_C = np.zeros(0, dtype=np.int64)
        self._probs_C = np.zeros(0, dtype=np.float32)
        self._rows_C = np.zeros(0, dtype=np.int64)  # in the expansion it was run in
        self._masks_C = np.zeros(0, dtype=np.uint64)  # in the order of running
        self._level = 0  # first candidate of the last level
        self._run_G = np.zeros(len(sizes_G), dtype=np.int64)  # nodes expanded
        self._run_masks_GM = np.zeros((len(sizes_G), max_nodes), dtype=np.uint64)

    def add(
        self, expansion: Expansion | None, tokens_FW: NDArray, probs_FW: NDArray[np.floating]
    ) -> None:
        """Children of what was expanded, the most probable of each first; None: of the roots.

        ``probs_FW``: that a child is accepted where its parent was, in [0, 1]; NaN never is.
        """
        tokens_FW, probs_FW = tokens_FW[:, : self._topk], probs_FW[:, : self._topk]
        if expansion is None:
            count = len(self._sizes_G)
            trees_F, parents_F = np.arange(count), np.full(count, -1)
            depths_F, before_F = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.float32)
        else:
            trees_F, parents_F = expansion.trees_F, expansion.candidates_F
            depths_F, before_F = expansion.depths_F, self._probs_C[parents_F]
        probs_FW = before_F[:, None] * probs_FW.astype(np.float32)
        rows, places = np.nonzero((probs_FW >= self._floor) & (self._sizes_G[trees_F] > 0)[:, None])
        self._level = len(self._trees_C)
        none = np.zeros(len(rows), dtype=np.int64)
        self._trees_C = np.concatenate([self._trees_C, trees_F[rows]])
        self._parents_C = np.concatenate([self._parents_C, parents_F[rows]])
        self._tokens_C = np.concatenate([self._tokens_C, tokens_FW[rows, places]])
        self._depths_C = np.concatenate([self._depths_C, depths_F[rows] + 1])
        self._probs_C = np.concatenate([self._probs_C, probs_FW[rows, places]])
        self._rows_C = np.concatenate([self._rows_C, none])
        self._masks_C = np.concatenate([self._masks_C, none.view(np.uint64)])

    def expand(self) -> Expansion:
        """The nodes of the last level to run: those that may yet have children among the kept
        nodes."""
        rank_C = self._ranks(0)
        level = slice(self._level, None)
        trees = self._trees_C[level]
        useful = rank_C[level] < self._sizes_G[trees] - 1
        useful &= self._depths_C[level] < self._max_depths_G[trees]
        # The most probable of the level are the first of it that are useful.
        chosen = self._level + np.flatnonzero(useful & (self._ranks(self._level) < self._topk))
        chosen = chosen[np.argsort(self._trees_C[chosen], kind="stable")]
        return self._run(chosen)

    def _run(self, chosen_F: NDArray[np.int64]) -> Expansion:
        trees_F, parents_F = self._trees_C[chosen_F], self._parents_C[chosen_F]
        trees_B, new_B = np.unique(trees_F, return_counts=True)
        place_F = self._run_G[trees_F] + places_within(new_B)
        is_first = parents_F < 0
        parent_rows_F = np.where(is_first, trees_F, self._rows_C[parents_F])
        above_F = np.where(is_first, np.uint64(1), self._masks_C[parents_F])
        masks_F = above_F | np.uint64(2) << place_F.astype(np.uint64)
        self._rows_C[chosen_F] = np.arange(len(chosen_F))
        self._masks_C[chosen_F] = masks_F
        self._run_masks_GM[trees_F, place_F] = masks_F
        self._run_G[trees_B] += new_B
        counts_B = self._run_G[trees_B]
        return Expansion(
            candidates_F=chosen_F,
            trees_F=trees_F,
            parent_rows_F=parent_rows_F,
            tokens_F=self._tokens_C[chosen_F],
            depths_F=self._depths_C[chosen_F],
            trees_B=trees_B,
            counts_B=counts_B,
            new_B=new_B,
            masks_N=self._run_masks_GM[np.repeat(trees_B, counts_B), places_within(counts_B)],
        )

    def finish(self, source: int) -> DraftTrees:
        """The most probable candidates of each tree, as many as it may keep."""
        return kept_trees(
            self._sizes_G,
            trees_C=self._trees_C,
            parents_C=self._parents_C,
            tokens_C=self._tokens_C,
            depths_C=self._depths_C,
            probs_C=self._probs_C,
            source=source,
        )

    def _ranks(self, first: int) -> NDArray[np.int64]:
        """The place of each candidate from ``first`` on among those of its tree: the most probable
        first, of equals the older."""
        return ranks_of(self._trees_C[first:], self._probs_C[first:], len(self._sizes_G))
