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

import torch

_NONE = -1.0  # the probability of what is no candidate


@dataclass(kw_only=True, slots=True)
class TreeNodes:
    """Nodes to run, or run before: W of each level, of which some may be none.

    Node n of a tree is bit n + 1 of a mask; bit 0 stands for what is known.
    """

    tokens_GN: torch.Tensor  # int64
    parents_GN: torch.Tensor  # int64, nodes of the level before; -1: the root
    masks_GN: torch.Tensor  # int64 bits; what is none sees what is known, and itself
    is_node_GN: torch.Tensor


class TreeGrowth:
    """The trees of G requests while they grow. Call `add`, then `expand` and `add` in turn."""

    def __init__(
        self, sizes_G: torch.Tensor, depths_G: torch.Tensor, floor_1: torch.Tensor, topk: int
    ) -> None:
        """
        Args:
            sizes_G: int64, most nodes of each finished tree.
            depths_G: int64, how deep it may grow.
            floor_1: float32, above zero: nodes less probable than this are no candidates.
            topk: most children of a node, and nodes of a level that are expanded.
        """
        self._sizes_G1 = sizes_G[:, None]
        self._depths_G1 = depths_G[:, None]
        self._floor_1 = floor_1
        self._topk = topk
        none = self._sizes_G1[:, :0]
        self.nodes = TreeNodes(tokens_GN=none, parents_GN=none, masks_GN=none, is_node_GN=none > 0)
        self.candidates_GN = none  # those the nodes were; -1: none
        self.tokens_GC = none
        self.probs_GC = none.float()
        self._first = 0  # candidate of the last level
        # Of the rows whose children come next.
        self._before_GF = torch.ones_like(self._sizes_G1, dtype=torch.float32)
        self._is_row_GF = self._sizes_G1 > 0

    def add(self, tokens_GFW: torch.Tensor, probs_GFW: torch.Tensor) -> None:
        """Add the children of the newest level; at first, those of the roots.

        ``probs_GFW``: that a child is accepted where its parent was, in [0, 1]; NaN never is.
        """
        probs_GFW = self._before_GF[:, :, None] * probs_GFW
        is_one_GFW = (probs_GFW >= self._floor_1) & self._is_row_GF[:, :, None]
        probs_GFW = probs_GFW.masked_fill(is_one_GFW.logical_not(), _NONE)
        self._first = self.tokens_GC.shape[1]
        self.tokens_GC = torch.cat([self.tokens_GC, tokens_GFW.flatten(1)], 1)
        self.probs_GC = torch.cat([self.probs_GC, probs_GFW.flatten(1)], 1)

    @property
    def rows_GF(self) -> torch.Tensor:
        """The probabilities of the newest rows, 0 of what is none."""
        return self._before_GF.masked_fill(self._is_row_GF.logical_not(), 0.0)

    @property
    def children_GI(self) -> torch.Tensor:
        """The probabilities of the children added last, below 0 of what is no candidate."""
        return self.probs_GC[:, self._first :]

    def expand(self) -> TreeNodes:
        """Choose the next level: the most probable candidates that may yet have children in the
        finished tree. Returns all nodes so far, whose last W are the new level."""
        width, first, nodes = self._topk, self._first, self.nodes
        run = nodes.tokens_GN.shape[1]
        level = run // width + 1
        probs_GW, chosen_GW = self.probs_GC[:, first:].sort(dim=1, descending=True, stable=True)
        probs_GW, chosen_GW = probs_GW[:, :width], chosen_GW[:, :width] + first
        # Its rank among all candidates of the tree, of equals the older first.
        own_GW1, all_G1C = probs_GW[:, :, None], self.probs_GC[:, None]
        is_older_GWC = (
            torch.arange(all_G1C.shape[2], device=chosen_GW.device) < chosen_GW[..., None]
        )
        is_before_GWC = (all_G1C > own_GW1) | ((all_G1C == own_GW1) & is_older_GWC)
        is_node_GW = (probs_GW >= 0) & (is_before_GWC.sum(2) < self._sizes_G1 - 1)
        is_node_GW &= self._depths_G1 > level

        if run:
            children = (self.tokens_GC.shape[1] - first) // width  # of a row
            parents_GW = run - width + (chosen_GW - first) // children
            above_GW = nodes.masks_GN.gather(1, parents_GW)
        else:
            parents_GW = torch.full_like(chosen_GW, -1)
            above_GW = torch.ones_like(chosen_GW)
        own_W = 1 << torch.arange(run + 1, run + 1 + width, device=chosen_GW.device)
        is_none_GW = is_node_GW.logical_not()
        masks_GW = above_GW.masked_fill(is_none_GW, 1) | own_W
        tokens_GW = self.tokens_GC.gather(1, chosen_GW).masked_fill(is_none_GW, 0)
        candidates_GW = chosen_GW.masked_fill(is_none_GW, -1)
        self._before_GF, self._is_row_GF = probs_GW, is_node_GW
        self.candidates_GN = torch.cat([self.candidates_GN, candidates_GW], 1)
        self.nodes = TreeNodes(
            tokens_GN=torch.cat([nodes.tokens_GN, tokens_GW], 1),
            parents_GN=torch.cat([nodes.parents_GN, parents_GW], 1),
            masks_GN=torch.cat([nodes.masks_GN, masks_GW], 1),
            is_node_GN=torch.cat([nodes.is_node_GN, is_node_GW], 1),
        )
        return self.nodes
