"""Draft trees grown where their draft runs: what `TreeGrowth` does, in fixed shapes.

Shapes depend on how many trees there are and how often they grew, and on nothing that was chosen:
a level has as many nodes as may be expanded, those there are first, and what is none is marked. So
nothing waits for the device, and all of it can be captured.

Legend: G trees, F rows of a level, W children of a row and nodes of a level, C candidates of a
tree, I those of the last level, N nodes of a tree that were run or marked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NONE = -1.0  # the probability of what is no candidate


@dataclass(kw_only=True, slots=True)
class DeviceNodes:
    """Nodes to run, or run before: W of each level, of which some may be none.

    Node n of a tree is bit n + 1 of a mask; bit 0 stands for what is known.
    """

    tokens_GN: torch.Tensor  # int64
    parents_GN: torch.Tensor  # int64, nodes of the level before; -1: the root
    masks_GN: torch.Tensor  # int64 bits; what is none sees what is known, and itself
    is_node_GN: torch.Tensor


class DeviceGrowth:
    """See `TreeGrowth`: `add`, then `expand` and `add` in turn."""

    def __init__(
        self, sizes_G: torch.Tensor, depths_G: torch.Tensor, floor_1: torch.Tensor, topk: int
    ) -> None:
        """
        Args:
            sizes_G, depths_G: int64, see `TreeGrowth`.
            floor_1: float32, above zero.
            topk: most children of a node, and nodes of a level.
        """
        self._sizes_G1 = sizes_G[:, None]
        self._depths_G1 = depths_G[:, None]
        self._floor_1 = floor_1
        self._topk = topk
        trees = len(sizes_G)
        none = sizes_G.new_zeros((trees, 0))
        self.nodes = DeviceNodes(
            tokens_GN=none,
            parents_GN=none,
            masks_GN=none,
            is_node_GN=torch.zeros_like(none, dtype=torch.bool),
        )
        self.candidates_GN = none  # those the nodes were; -1: none
        self.tokens_GC = none
        self.probs_GC = torch.zeros_like(none, dtype=torch.float32)
        self._first = 0  # candidate of the last level
        # Of the rows whose children come next.
        self._before_GF = torch.ones_like(sizes_G, dtype=torch.float32)[:, None]
        self._is_row_GF = self._sizes_G1 > 0

    def add(self, tokens_GFW: torch.Tensor, probs_GFW: torch.Tensor) -> None:
        """Children of the level, the most probable of each first; at first: of the roots."""
        probs_GFW = self._before_GF[:, :, None] * probs_GFW
        is_one_GFW = (probs_GFW >= self._floor_1) & self._is_row_GF[:, :, None]
        probs_GFW = probs_GFW.masked_fill(~is_one_GFW, _NONE)
        self._first = self.tokens_GC.shape[1]
        self.tokens_GC = torch.cat([self.tokens_GC, tokens_GFW.flatten(1)], dim=1)
        self.probs_GC = torch.cat([self.probs_GC, probs_GFW.flatten(1)], dim=1)

    def expand(self) -> DeviceNodes:
        """All nodes so far; the last W are those of the new level."""
        width, first = self._topk, self._first
        level = self.nodes.tokens_GN.shape[1] // width + 1
        index_C = torch.arange(self.probs_GC.shape[1], device=self.probs_GC.device)
        probs_GI, index_I = self.probs_GC[:, first:], index_C[first:]
        is_older_IC = index_C < index_I[:, None]
        others_G1C, own_GI1 = self.probs_GC[:, None, :], probs_GI[:, :, None]
        is_before_GIC = (others_G1C > own_GI1) | ((others_G1C == own_GI1) & is_older_IC)
        is_chosen_GI = (probs_GI >= 0) & (is_before_GIC.sum(dim=2) < self._sizes_G1 - 1)
        is_chosen_GI &= self._depths_G1 > level
        is_chosen_GI &= is_before_GIC[:, :, first:].sum(dim=2) < width

        # In the order they were thought of; what is not chosen goes where nobody looks.
        place_GI = (is_chosen_GI.cumsum(dim=1) - 1).masked_fill(~is_chosen_GI, width)
        chosen_GW = index_I.new_full((len(probs_GI), width + 1), first)
        chosen_GW = chosen_GW.scatter(1, place_GI, index_I.expand_as(place_GI))[:, :width]
        index_W = torch.arange(width, device=index_C.device)
        is_node_GW = index_W < is_chosen_GI.sum(dim=1, keepdim=True)
        self._append(level, chosen_GW, index_W, is_node_GW)
        return self.nodes

    def _append(
        self, level: int, chosen_GW: torch.Tensor, index_W: torch.Tensor, is_node_GW: torch.Tensor
    ) -> None:
        width, nodes, run = self._topk, self.nodes, (level - 1) * self._topk
        if level == 1:
            parents_GW, above_GW = torch.full_like(chosen_GW, -1), torch.ones_like(chosen_GW)
        else:
            children = (self.tokens_GC.shape[1] - self._first) // width  # of a row
            parents_GW = run - width + (chosen_GW - self._first) // children
            above_GW = nodes.masks_GN.gather(1, parents_GW)
        own_W = torch.ones_like(index_W) << (index_W + run + 1)
        masks_GW = above_GW.masked_fill(~is_node_GW, 1) | own_W
        tokens_GW = self.tokens_GC.gather(1, chosen_GW).masked_fill(~is_node_GW, 0)
        self._before_GF, self._is_row_GF = self.probs_GC.gather(1, chosen_GW), is_node_GW
        candidates_GW = chosen_GW.masked_fill(~is_node_GW, -1)
        self.candidates_GN = torch.cat([self.candidates_GN, candidates_GW], dim=1)
        self.nodes = DeviceNodes(
            tokens_GN=torch.cat([nodes.tokens_GN, tokens_GW], dim=1),
            parents_GN=torch.cat([nodes.parents_GN, parents_GW], dim=1),
            masks_GN=torch.cat([nodes.masks_GN, masks_GW], dim=1),
            is_node_GN=torch.cat([nodes.is_node_GN, is_node_GW], dim=1),
        )
