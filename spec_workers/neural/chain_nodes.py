"""Nodes of growing trees as rows of a chain's steps: each step runs all that stand so far.

Legend: F nodes of a level, N nodes of all levels, T rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_workers.neural.tree_growth import Expansion


@dataclass(kw_only=True, slots=True)
class NodeLevel:
    """The rows of one step: nodes of a tree side by side, parents first, trees ascending."""

    trees_T: NDArray[np.int64]
    tokens_T: NDArray[np.int64]
    depths_T: NDArray[np.int64]
    sources_T: NDArray[np.int64]  # parents' rows in the step before; roots stand behind, by tree
    new_rows_F: NDArray[np.int64]  # the rows of the expansion's nodes, in its order


class ChainNodes:
    """Call `run` with each expansion of a `TreeGrowth`, in turn."""

    def __init__(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        self._trees_N = none
        self._tokens_N = none
        self._depths_N = none
        self._parents_N = none  # -1: the root
        self._rows_N = none  # in the last step
        self._num_rows = 0  # of the last step
        self._level = 0  # first node of the last expansion

    def run(self, expansion: Expansion) -> NodeLevel:
        first = len(self._trees_N)
        above_F = self._level + expansion.parent_rows_F
        parents_F = np.where(expansion.depths_F == 1, -1, above_F)
        self._trees_N = np.concatenate([self._trees_N, expansion.trees_F])
        self._tokens_N = np.concatenate([self._tokens_N, expansion.tokens_F])
        self._depths_N = np.concatenate([self._depths_N, expansion.depths_F])
        self._parents_N = np.concatenate([self._parents_N, parents_F])
        self._level = first

        # A tree that did not grow has no children to be told of.
        grown_N = np.flatnonzero(np.isin(self._trees_N, expansion.trees_B))
        nodes_T = grown_N[np.argsort(self._trees_N[grown_N], kind="stable")]
        parents_T, trees_T = self._parents_N[nodes_T], self._trees_N[nodes_T]
        rows_N = np.append(self._rows_N, np.full(len(parents_F) + 1, -1))  # the last one's a root's
        sources_T = np.where(parents_T < 0, self._num_rows + trees_T, rows_N[parents_T])
        self._rows_N = np.full(len(self._trees_N), -1, dtype=np.int64)
        self._rows_N[nodes_T] = np.arange(len(nodes_T))
        self._num_rows = len(nodes_T)
        return NodeLevel(
            trees_T=trees_T,
            tokens_T=self._tokens_N[nodes_T],
            depths_T=self._depths_N[nodes_T],
            sources_T=sources_T,
            new_rows_F=self._rows_N[first:],
        )
