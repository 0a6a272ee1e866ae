"""The arrays of growing trees, which implementations write in place.

Legend: see `rollout.ops.tree_growth`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TreeArrays(NamedTuple):
    """All is on one device, and rows are adjacent. Only what a level wrote is defined."""

    sizes_G: torch.Tensor
    depths_G: torch.Tensor
    floor_1: torch.Tensor
    tokens_GC: torch.Tensor  # int32
    probs_GC: torch.Tensor  # float32, below 0: no candidate
    node_tokens_GN: torch.Tensor  # int64
    node_parents_GN: torch.Tensor  # int64
    node_masks_GN: torch.Tensor  # int64
    is_node_GN: torch.Tensor  # bool
    node_candidates_GN: torch.Tensor  # int32, below 0: none
    row_probs_GW: torch.Tensor  # float32, of the rows whose children come next
    is_row_GW: torch.Tensor  # bool

    @staticmethod
    def of(
        sizes_G: torch.Tensor,
        depths_G: torch.Tensor,
        floor_1: torch.Tensor,
        topk: int,
        num_levels: int,
    ) -> TreeArrays:
        """Undefined arrays for trees of so many levels."""
        num_nodes = topk * (num_levels - 1)
        num_candidates = topk * (1 + num_nodes)

        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return sizes_G.new_empty((len(sizes_G), columns), dtype=dtype)

        return TreeArrays(
            sizes_G=sizes_G,
            depths_G=depths_G,
            floor_1=floor_1,
            tokens_GC=empty(num_candidates, torch.int32),
            probs_GC=empty(num_candidates, torch.float32),
            node_tokens_GN=empty(num_nodes, torch.int64),
            node_parents_GN=empty(num_nodes, torch.int64),
            node_masks_GN=empty(num_nodes, torch.int64),
            is_node_GN=empty(num_nodes, torch.bool),
            node_candidates_GN=empty(num_nodes, torch.int32),
            row_probs_GW=empty(topk, torch.float32),
            is_row_GW=empty(topk, torch.bool),
        )

    @property
    def topk(self) -> int:
        """W, children of a row and nodes of a level."""
        return self.row_probs_GW.shape[1]

    def rows(self, level: int) -> int:
        """Rows of a level, 0 for roots."""
        return self.topk if level else 1

    def first_node(self, level: int) -> int:
        """The first node of a level, 1 for children of the roots."""
        return self.topk * (level - 1)

    def first_candidate(self, level: int) -> int:
        """The first of the children of a level's rows, 0 for roots."""
        return self.topk * (1 + self.first_node(level)) if level else 0
