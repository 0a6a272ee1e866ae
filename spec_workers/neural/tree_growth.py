"""Draft trees grown level by level, the most probable nodes first, in fixed shapes.

EAGLE-2 (Li et al. 2024): a node is worth the probability that all of its path is accepted; of each
level the most probable are expanded, and of all candidates the most probable make the tree
(`proposal.py`). A node is never more probable than its parent, so what is chosen are trees.

Shapes depend on the number of trees and levels alone, not on what was chosen: a level always has as
many nodes as may be expanded, the actual ones first, and the others are marked. So nothing waits
for a device, and all of it can be captured.

Legend: G trees, F rows of a level, W children of a row and nodes of a level, C candidates of a
tree, I those of the last level, N nodes of a tree that were run or marked.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec_workers.neural.arrays import Array, Arrays

_NONE = -1.0  # the probability of what is no candidate


@dataclass(kw_only=True, slots=True)
class TreeNodes:
    """Nodes to run, or run before: W of each level, of which some may be none.

    Node n of a tree is bit n + 1 of a mask; bit 0 stands for what is known.
    """

    tokens_GN: Array  # int64
    parents_GN: Array  # int64, nodes of the level before; -1: the root
    masks_GN: Array  # int64 bits; what is none sees what is known, and itself
    is_node_GN: Array


class TreeGrowth:
    """The trees of G requests while they grow. Call `add`, then `expand` and `add` in turn."""

    def __init__(
        self, arrays: Arrays, sizes_G: Array, depths_G: Array, floor_1: Array, topk: int
    ) -> None:
        """
        Args:
            arrays: whose the others are.
            sizes_G: int64, most nodes of each finished tree.
            depths_G: int64, how deep it may grow.
            floor_1: float32, above zero: nodes less probable than this are no candidates.
            topk: most children of a node, and nodes of a level that are expanded.
        """
        self._arrays = arrays
        self._trees_G1 = arrays.arange(len(sizes_G))[:, None]
        self._sizes_G1 = sizes_G[:, None]
        self._depths_G1 = depths_G[:, None]
        self._floor_1 = floor_1
        self._topk = topk
        none = self._trees_G1[:, :0]
        self.nodes = TreeNodes(tokens_GN=none, parents_GN=none, masks_GN=none, is_node_GN=none > 0)
        self.candidates_GN = none  # those the nodes were; -1: none
        self.tokens_GC = none
        self.probs_GC = arrays.float32(none)
        self._first = 0  # candidate of the last level
        # Of the rows whose children come next.
        self._before_GF = arrays.float32(self._trees_G1 >= 0)
        self._is_row_GF = self._sizes_G1 > 0

    def add(self, tokens_GFW: Array, probs_GFW: Array) -> None:
        """Add the children of the newest level, the most probable of each first; at first, those of
        the roots.

        ``probs_GFW``: that a child is accepted where its parent was, in [0, 1]; NaN never is.
        """
        join = self._arrays.alike.concatenate
        probs_GFW = self._before_GF[:, :, None] * probs_GFW
        is_one_GFW = (probs_GFW >= self._floor_1) & self._is_row_GF[:, :, None]
        probs_GFW = self._arrays.masked(is_one_GFW, probs_GFW, _NONE)
        flat = (len(probs_GFW), probs_GFW.shape[1] * probs_GFW.shape[2])
        self._first = self.tokens_GC.shape[1]
        self.tokens_GC = join([self.tokens_GC, tokens_GFW.reshape(flat)], 1)
        self.probs_GC = join([self.probs_GC, probs_GFW.reshape(flat)], 1)

    @property
    def rows_GF(self) -> Array:
        """The probabilities of the newest rows, 0 of what is none."""
        return self._arrays.masked(self._is_row_GF, self._before_GF, 0.0)

    @property
    def children_GI(self) -> Array:
        """The probabilities of the children added last, below 0 of what is no candidate."""
        return self.probs_GC[:, self._first :]

    def expand(self) -> TreeNodes:
        """Choose the next level: the most probable candidates that may yet have children in the
        finished tree. Returns all nodes so far, whose last W are the new level."""
        width, first = self._topk, self._first
        level = self.nodes.tokens_GN.shape[1] // width + 1
        probs_GI = self.probs_GC[:, first:]
        rank_GI, level_rank_GI = self._arrays.ranks(self.probs_GC, first)
        is_chosen_GI = (probs_GI >= 0) & (rank_GI < self._sizes_G1 - 1)
        is_chosen_GI &= (level_rank_GI < width) & (self._depths_G1 > level)

        # In the order of the candidates; what is not chosen goes to a last column that is cut off.
        column_GI = self._arrays.masked(is_chosen_GI, is_chosen_GI.cumsum(axis=1) - 1, width)
        index_W = self._arrays.arange(width)
        chosen_GW = self._arrays.full((len(probs_GI), width + 1), first)
        chosen_GW[self._trees_G1, column_GI] = first + self._arrays.arange(probs_GI.shape[1])
        is_node_GW = index_W < is_chosen_GI.sum(axis=1)[:, None]
        self._append(level, chosen_GW[:, :width], index_W, is_node_GW)
        return self.nodes

    def _append(self, level: int, chosen_GW: Array, index_W: Array, is_node_GW: Array) -> None:
        arrays, join, nodes = self._arrays, self._arrays.alike.concatenate, self.nodes
        width, run = self._topk, (level - 1) * self._topk
        if level == 1:
            shape = (len(chosen_GW), width)
            parents_GW, above_GW = arrays.full(shape, -1), arrays.full(shape, 1)
        else:
            children = (self.tokens_GC.shape[1] - self._first) // width  # of a row
            parents_GW = run - width + (chosen_GW - self._first) // children
            above_GW = nodes.masks_GN[self._trees_G1, parents_GW]
        own_W = arrays.full((width,), 1) << (index_W + run + 1)
        masks_GW = arrays.masked(is_node_GW, above_GW, 1) | own_W
        tokens_GW = arrays.masked(is_node_GW, self.tokens_GC[self._trees_G1, chosen_GW], 0)
        self._before_GF, self._is_row_GF = self.probs_GC[self._trees_G1, chosen_GW], is_node_GW
        candidates_GW = arrays.masked(is_node_GW, chosen_GW, -1)
        self.candidates_GN = join([self.candidates_GN, candidates_GW], 1)
        self.nodes = TreeNodes(
            tokens_GN=join([nodes.tokens_GN, tokens_GW], 1),
            parents_GN=join([nodes.parents_GN, parents_GW], 1),
            masks_GN=join([nodes.masks_GN, masks_GW], 1),
            is_node_GN=join([nodes.is_node_GN, is_node_GW], 1),
        )
