"""Draft trees grown level by level, the most probable nodes first, in fixed shapes.

EAGLE-2 (Li et al. 2024): a node is worth the probability that all of its path is accepted; of each
level the most probable are expanded, and of all candidates the most probable make the tree
(`choose_nodes`). A node is never more probable than its parent, so what is chosen are trees.

Shapes depend on the number of trees and levels alone, not on what was chosen: a level always has as
many nodes as may be expanded, the actual ones first, and the others are marked. So nothing waits
for a device, and all of it can be captured.

Legend: G trees, F rows of a level, W nodes of a level and children of a row, C candidates of a
tree, I those of the last level, N nodes of a tree that were run or marked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import gpu
from rollout.ops.tree_growth import native, reference
from rollout.ops.tree_growth.arrays import TreeArrays


class TreeNodes(NamedTuple):
    """Nodes to run, or run before: W of each level, of which some may be none.

    Node n of a tree is bit n + 1 of a mask; bit 0 stands for what is known.
    """

    tokens_GN: torch.Tensor  # int64, 0 of what is none
    parents_GN: torch.Tensor  # int64, nodes of the level before; -1: the root
    masks_GN: torch.Tensor  # int64 bits; what is none sees what is known, and itself
    is_node_GN: torch.Tensor


class TreeGrowth:
    """The trees of G requests while they grow. Call `add`, then `expand` and `add` in turn."""

    def __init__(
        self,
        sizes_G: torch.Tensor,
        depths_G: torch.Tensor,
        floor_1: torch.Tensor,
        topk: int,
        num_levels: int,
    ) -> None:
        """
        Args:
            sizes_G: int64, most nodes of each finished tree.
            depths_G: int64, how deep it may grow.
            floor_1: float32, above zero: nodes less probable than this are no candidates.
            topk: W, children of a node, and nodes of a level that are expanded.
            num_levels: of children that may be added.
        """
        self._arrays = TreeArrays.of(sizes_G, depths_G, floor_1, topk, num_levels)
        self._level = -1  # of the rows whose children were added last
        self._newest = 0  # level of rows, 0 for roots

    def add(self, tokens_GFW: torch.Tensor, probs_GFW: torch.Tensor) -> None:
        """Add the children of the newest level's rows; at first, those of the roots.

        Args:
            tokens_GFW: int64. One F stands for all rows.
            probs_GFW: float32, that a child is accepted where its parent was, in [0, 1]; NaN never
                is.
        """
        self._level += 1
        rows = self._arrays.rows(self._level)
        shape = (-1, rows, self._arrays.topk)
        tokens_GFW, probs_GFW = tokens_GFW.expand(shape), probs_GFW.expand(shape)
        _implementation(probs_GFW.device).add(self._arrays, self._level, tokens_GFW, probs_GFW)

    def expand(self) -> TreeNodes:
        """Choose the next level: the most probable candidates that may yet have children in the
        finished tree. Returns all nodes so far, whose last W are the new level."""
        arrays = self._arrays
        self._newest = self._level + 1
        _implementation(arrays.probs_GC.device).expand(arrays, self._newest)
        own = slice(arrays.first_node(self._newest + 1))
        return TreeNodes(
            tokens_GN=arrays.node_tokens_GN[:, own],
            parents_GN=arrays.node_parents_GN[:, own],
            masks_GN=arrays.node_masks_GN[:, own],
            is_node_GN=arrays.is_node_GN[:, own],
        )

    def results(self) -> dict[str, torch.Tensor]:
        """The arguments of `choose_nodes` that it grew."""
        return {
            "tokens_GC": self.tokens_GC,
            "probs_GC": self.probs_GC,
            "candidates_GN": self.candidates_GN,
        }

    @property
    def tokens_GC(self) -> torch.Tensor:
        """int32, of all candidates so far."""
        return self._arrays.tokens_GC[:, : self._arrays.first_candidate(self._level + 1)]

    @property
    def probs_GC(self) -> torch.Tensor:
        """float32, of all candidates so far; below 0: none."""
        return self._arrays.probs_GC[:, : self._arrays.first_candidate(self._level + 1)]

    @property
    def candidates_GN(self) -> torch.Tensor:
        """int32, the candidates that the nodes were; below 0: none. Of those whose children were
        added."""
        return self._arrays.node_candidates_GN[:, : self._arrays.first_node(self._level + 1)]

    @property
    def children_GI(self) -> torch.Tensor:
        """The probabilities of the children added last, below 0 of what is no candidate."""
        return self.probs_GC[:, self._arrays.first_candidate(self._level) :]

    @property
    def rows_GF(self) -> torch.Tensor:
        """The probabilities of the newest rows, 0 of what is none; one F for roots."""
        arrays = self._arrays
        if not self._newest:
            return (arrays.sizes_G[:, None] > 0).float()
        return arrays.row_probs_GW.masked_fill(arrays.is_row_GW.logical_not(), 0.0)


def _implementation(device: torch.device) -> Any:
    """The module that has `add` and `expand` for tensors of the device."""
    if gpu.runs_on(device):
        from rollout.ops.tree_growth import triton

        return triton
    return reference if native.is_missing() else native


class ChosenNodes(NamedTuple):
    """The most probable candidates of each tree, as nodes of `DraftTrees`, N of all trees."""

    offsets_G1: NDArray[np.int64]
    tokens_N: NDArray[np.int32]
    parents_N: NDArray[np.int32]
    depths_N: NDArray[np.int32]
    masks_N: NDArray[np.uint64]
    probs_N: NDArray[np.float32]


def choose_nodes(
    tokens_GC: NDArray[np.int32],
    probs_GC: NDArray[np.float32],
    candidates_GN: NDArray[np.int32],
    sizes_G: NDArray[np.int64],
    topk: int,
) -> ChosenNodes:
    """The most probable candidates of each tree, at most ``sizes_G``; of equals the older.

    The arrays are those of `TreeGrowth`, on the host.
    """
    choose = reference.choose_nodes if native.is_missing() else native.choose_nodes
    return ChosenNodes(*choose(tokens_GC, probs_GC, candidates_GN, sizes_G, topk))
