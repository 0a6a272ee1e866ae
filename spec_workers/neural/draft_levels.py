"""Runs the levels of growing trees through a chain of draft runners.

A chain of one (EAGLE) runs the new nodes of each level on its own hidden states; their keys and
values stay in its scratch slots. In a longer chain (MTP) runner k runs level k: its rows are all
nodes down to that level, with the hidden states that runner k - 1 gave their parents and with keys
and values of its own. A node of depth d stands d - 1 positions behind the runner's last known one.

On the CPU, where reading results costs nothing, only actual nodes are run. On a GPU nothing is read
between levels: shapes are fixed, and all inputs that do not depend on the chosen nodes are sent
before the first level.

Legend: G trees, P trees of a shape, padding included, W nodes of a level, N nodes of a tree so far,
F nodes of a tree that are run, H the root and the N nodes, E hidden; B trees with nodes to run, T
rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.memory.slots import NULL_SLOT
from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.tree_growth import TreeNodes
from spec_workers.neural.draft_runner import DraftRunner, NodeRows
from spec_workers.neural.draft_state import DraftState

Tensors = dict[str, torch.Tensor]


class DraftLevels:
    """The draft's networks, level by level: `roots`, then `run` for levels 1, 2, ..."""

    def __init__(
        self,
        runners: Sequence[DraftRunner],
        state: DraftState,
        *,
        topk: int,
        num_steps: int,
        on_host: bool,
    ) -> None:
        """``on_host``: only actual nodes are run."""
        self._runners = runners
        self._state = state
        self._topk = topk
        self._num_steps = num_steps
        self._on_host = on_host
        self._is_chain = len(runners) > 1

    @property
    def first(self) -> DraftRunner:
        """The first runner of the chain."""
        return self._runners[0]

    def is_warm(self) -> bool:
        """Whether each runner's last forward was neither captured nor in a new shape."""
        return all(runner.is_warm for runner in self._runners)

    def inputs(self, rows_G: NDArray[np.int64], padding: int) -> dict[str, NDArray]:
        """The arrays that fixed shapes read beside ``rows``, for trees of these rows of
        ``req_to_token``, which were followed, and padding.

        Padding has rows that see nothing, and keys in the null slot. A tree whose request the draft
        has not read has no nodes, so what its rows attend to does not matter.
        """
        if self._on_host:
            return {}
        trees = len(rows_G) + padding
        real_G1 = np.minimum(np.arange(trees + 1), len(rows_G)) * self._topk
        arrays: dict[str, NDArray] = {
            "plan_rows": np.pad(rows_G, (0, padding)).astype(np.int32),
            "run_lens": np.ones(trees, dtype=np.int32),
            **{
                f"offsets_{level}": (real_G1 * level).astype(np.int32)
                for level in range(1, self._num_steps)
            },
        }
        for k in self._level_runners():
            kv, nodes = self._runners[k].kv, self._runners[k].nodes_per_tree
            starts_G = np.maximum(kv.lens_Q[rows_G] - 1, 0)
            scratch = kv.first_scratch + np.arange(len(rows_G) * nodes, dtype=np.int32)
            arrays[f"starts_{k}"] = np.pad(starts_G, (0, padding)).astype(np.int32)
            arrays[f"scratch_{k}"] = np.pad(
                scratch.reshape(len(rows_G), nodes),
                ((0, padding), (0, 0)),
                constant_values=NULL_SLOT,
            )
        return arrays

    def changes(self, rows_G: NDArray[np.int64]) -> dict[str, NDArray]:
        """The changes to the runners' tables on the device."""
        arrays: dict[str, NDArray] = {}
        for k in self._level_runners():
            runner = self._runners[k]
            arrays |= runner.table.changes(rows_G, runner.kv.lens_Q[rows_G])
        return arrays

    def apply(self, tensors: Tensors, rows_G: NDArray[np.int64]) -> None:
        """Apply the `changes` of these rows, which are among ``tensors``."""
        for k in self._level_runners():
            runner = self._runners[k]
            runner.table.apply(tensors, rows_G, runner.kv.lens_Q[rows_G])

    def roots(self, inputs: Tensors) -> torch.Tensor:
        """Hidden states [P, 1, E] that the trees grow from."""
        return self._state.hidden(0, inputs["rows"])[:, None]

    def run(
        self,
        level: int,
        nodes: TreeNodes,
        above_PHE: torch.Tensor,
        inputs: Tensors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [P, W, E] of the level's nodes, and what the next level takes.

        ``level``: 1 for children of the roots. ``above_PHE``: what `roots` or the level before
        gave.
        """
        k = level if self._is_chain else 0
        first = 0 if self._is_chain else (level - 1) * self._topk
        if self._on_host:
            hidden_PFE = self._run_nodes(k, first, nodes, above_PHE, inputs)
        else:
            hidden_PFE = self._run_all(k, level, first, nodes, above_PHE, inputs)
        root_PHE = self._state.hidden(k, inputs["rows"])[:, None] if self._is_chain else above_PHE
        return hidden_PFE[:, -self._topk :], torch.cat([root_PHE, hidden_PFE], dim=1)

    def logits(self, level: int, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._runners[level if self._is_chain else 0].logits(hidden_RE)

    def _level_runners(self) -> range:
        """The runners that run nodes of trees."""
        return range(1, len(self._runners)) if self._is_chain else range(1)

    def _run_all(
        self,
        k: int,
        level: int,
        first: int,
        nodes: TreeNodes,
        above_PHE: torch.Tensor,
        inputs: Tensors,
    ) -> torch.Tensor:
        """Hidden states [P, F, E], undefined where there is no node."""
        last = level * self._topk
        runner, device = self._runners[k], above_PHE.device
        depths_F = torch.arange(first, last, device=device) // self._topk
        positions_PF = (inputs["ends"] - 1 - k)[:, None] + depths_F
        # Where there is no node the position may be out of range, and is moved into it.
        positions_PF = positions_PF.clamp(0, runner.table.tensor.shape[1] - 1)
        columns_PF1 = nodes.parents_GN[:, first:, None] + 1
        hidden_PFE = above_PHE.gather(1, columns_PF1.expand(-1, -1, above_PHE.shape[2]))
        hidden_TE = runner.forward(
            nodes.tokens_GN[:, first:].flatten(),
            hidden_PFE.flatten(0, 1),
            positions_PF.flatten(),
            inputs[f"scratch_{k}"][:, first:last].flatten().long(),
            self._plan(k, level, first, nodes, inputs),
        )
        return hidden_TE.view(hidden_PFE.shape)

    def _run_nodes(
        self,
        k: int,
        first: int,
        nodes: TreeNodes,
        above_GHE: torch.Tensor,
        inputs: Tensors,
    ) -> torch.Tensor:
        """Hidden states [G, F, E], zero where there is no node and in trees without a new one."""
        is_node_GN, tokens_GN = nodes.is_node_GN.numpy(), nodes.tokens_GN.numpy()
        grows_G = np.logical_or.reduce(is_node_GN[:, -self._topk :], axis=1)
        is_used_GN = is_node_GN & grows_G[:, None]
        is_run_GF = is_used_GN[:, first:]
        trees_B = grows_G.nonzero()[0]
        trees_T, columns_T = is_run_GF.nonzero()
        ends_G = inputs["ends"].numpy()
        rows = NodeRows(
            rows_B=inputs["rows"].numpy()[trees_B],
            bands_B=trees_B,
            counts_B=is_used_GN.sum(axis=1)[trees_B],
            new_B=is_run_GF.sum(axis=1)[trees_B],
            masks_N=compact_masks(nodes.masks_GN.numpy().view(np.uint64), is_used_GN),
            input_ids_T=tokens_GN[:, first:][trees_T, columns_T],
            positions_T=ends_G[trees_T] - 1 - k + (first + columns_T) // self._topk,
        )
        parents_T = nodes.parents_GN.numpy()[:, first:][trees_T, columns_T] + 1
        trees, above = torch.from_numpy(trees_T), torch.from_numpy(parents_T)
        hidden_TE = self._runners[k].run_nodes(rows, above_GHE[trees, above])
        if len(trees_T) == is_run_GF.size:
            return hidden_TE.view(*is_run_GF.shape, above_GHE.shape[2])
        hidden_GFE = above_GHE.new_zeros((*is_run_GF.shape, above_GHE.shape[2]))
        hidden_GFE[trees, torch.from_numpy(columns_T)] = hidden_TE
        return hidden_GFE

    def _plan(
        self, k: int, level: int, first: int, nodes: TreeNodes, inputs: Tensors
    ) -> AttentionPlan:
        table = self._runners[k].table.tensor
        slots_PN = inputs[f"scratch_{k}"][:, : level * self._topk]
        return AttentionPlan(
            req_to_token=table,
            rows_B=inputs["plan_rows"],
            starts_B=inputs[f"starts_{k}"],
            run_lens_B=inputs["run_lens"],
            q_offsets_B1=inputs[f"offsets_{level - first // self._topk}"],
            node_offsets_B1=inputs[f"offsets_{level}"],
            # Views of one column, else.
            node_masks_N=nodes.masks_GN.flatten().contiguous(),
            node_slots_N=slots_PN.flatten().contiguous(),
        )


def compact_masks(
    masks_GN: NDArray[np.uint64], is_node_GN: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    """The masks of the actual nodes, tree after tree, renumbered as if there were no others."""
    if is_node_GN.all():
        return masks_GN.flatten()
    bits_N = np.arange(1, is_node_GN.shape[1] + 1, dtype=np.uint64)
    numbers_GN = is_node_GN.cumsum(axis=1).astype(np.uint64)  # a node's own bit
    sees_GNN = masks_GN[:, :, None] >> bits_N & np.uint64(1)
    compact_GN = (sees_GNN << numbers_GN[:, None, :]).sum(axis=2, dtype=np.uint64) | np.uint64(1)
    return compact_GN[is_node_GN]
