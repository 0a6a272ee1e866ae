"""A proposal of a block draft (DFlash): one forward, then a tree of products of marginals.

A block gives each position's distribution whatever the positions before hold, so all nodes of a
level have the same children, and a node is worth the product of its path's probabilities. The most
probable nodes make the tree, as of other neural drafts (`rollout.ops.tree_growth`).

Legend: P trees and padding, L levels, B rows of a block, T = P * B rows, W children, E hidden.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.memory.slots import NULL_SLOT
from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.tree_growth import TreeGrowth
from spec_workers.neural.guesses import Tensors
from spec_workers.neural.tree_proposer import Shape, TreeProposer, TreesToGrow, padded


class BlockProposer(TreeProposer):
    """Proposes trees from one forward of a block for each request."""

    def _inputs(self, wanted: TreesToGrow, shape: Shape) -> dict[str, NDArray]:
        runner, block = self._levels.first, 1 + self._num_steps
        kv, real = runner.kv, len(wanted.rows_G)
        padding = shape.trees - real
        tokens_GB = np.full((shape.trees, block), runner.model.spec.mask_token_id)
        for tree, b in enumerate(wanted.entries_G):
            entry = wanted.batch.entries[b]
            tokens_GB[tree, 0] = entry.request.tokens[entry.end - 1]
        ends_G = padded(wanted.ends_G, padding)
        limit = kv.table.shape[1] - 1  # guesses beyond the context are never verified
        positions_GB = (ends_G[:, None] - 1 + np.arange(block)).clip(0, limit)
        starts_G = padded(np.maximum(kv.lens_Q[wanted.rows_G] - 1, 0), padding)
        return {
            **super()._inputs(wanted, shape),
            **self._fixed_inputs(shape, real),
            "block_ids": tokens_GB.reshape(-1),
            "block_positions": positions_GB.reshape(-1),
            "block_rows": np.repeat(padded(wanted.rows_G, padding), block).astype(np.int32),
            "block_starts": np.repeat(starts_G, block).astype(np.int32),
        }

    def _fixed_inputs(self, shape: Shape, real: int) -> dict[str, NDArray]:
        """The inputs that depend on a shape and its number of trees without padding alone."""
        trees, block = shape.trees, 1 + self._num_steps
        slots_GB = np.full((trees, block), NULL_SLOT)
        slots_GB[:real] = np.arange(real * block).reshape(-1, block)
        slots_GB[:real] += self._levels.first.kv.first_scratch
        offsets_T1 = np.minimum(np.arange(trees * block + 1), real * block)
        # A plan's nodes see earlier ones alone. So each row is an entry of its own, the last node
        # of a chain of all the block's slots.
        chain_B = np.array([(2 << (node + 1)) - 1 for node in range(block)], dtype=np.int64)
        return {
            "guess_trees": np.repeat(np.arange(trees), shape.levels),
            "guess_levels": np.tile(np.arange(shape.levels), trees),
            "block_slots": slots_GB.reshape(-1),
            "block_run_lens": np.ones(trees * block, dtype=np.int32),
            "block_offsets": offsets_T1.astype(np.int32),
            "block_node_offsets": (offsets_T1 * block).astype(np.int32),
            "block_masks": np.tile(chain_B, trees * block),
            "block_node_slots": np.repeat(slots_GB, block, axis=0).reshape(-1).astype(np.int32),
        }

    def _grow(
        self, inputs: Tensors, shape: Shape, token_ms_G: NDArray[np.float64] | None = None
    ) -> Tensors:
        tokens_PLW, probs_PLW = self._children(inputs, shape)
        growth = TreeGrowth(
            inputs["sizes"], inputs["depths"], inputs["floor"], self._topk, shape.levels
        )
        for level in range(shape.levels):
            if level:
                growth.expand()
            growth.add(tokens_PLW[:, level, None], probs_PLW[:, level, None])
        return growth.results()

    def _children(self, inputs: Tensors, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and probabilities [P, L, W] of the children of each level's nodes."""
        runner = self._levels.first
        plan = AttentionPlan(
            req_to_token=runner.table.tensor,
            rows_B=inputs["block_rows"],
            starts_B=inputs["block_starts"],
            run_lens_B=inputs["block_run_lens"],
            q_offsets_B1=inputs["block_offsets"],
            node_offsets_B1=inputs["block_node_offsets"],
            node_masks_N=inputs["block_masks"],
            node_slots_N=inputs["block_node_slots"],
        )
        hidden_TE = runner.run_block(
            inputs["block_ids"], inputs["block_positions"], inputs["block_slots"], plan
        )
        hidden_PBE = hidden_TE.unflatten(0, (shape.trees, 1 + self._num_steps))
        hidden_PLE = hidden_PBE[:, 1 : 1 + shape.levels]
        logits_RD = runner.logits(hidden_PLE.flatten(0, 1))
        found = self._guesser.children(
            logits_RD, inputs, inputs["guess_trees"], inputs["guess_levels"]
        )
        tokens_PLW, probs_PLW = (each.unflatten(0, (shape.trees, shape.levels)) for each in found)
        return tokens_PLW, probs_PLW
