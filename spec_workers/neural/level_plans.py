"""Attention plans for the levels of trees on a device.

All that does not depend on what was chosen is sent before the first level; masks and slots of nodes
are found there.

Legend: G trees, P of a shape, W nodes of a level, N nodes of a tree so far.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.memory.slots import NULL_SLOT
from rollout.ops.paged_attention import AttentionPlan
from spec_workers.neural.device_growth import DeviceNodes
from spec_workers.neural.draft_runner import DraftRunner

Tensors = dict[str, torch.Tensor]


class LevelPlans:
    """The attention plans of one runner's levels; ``name`` tells its inputs from those of
    others."""

    def __init__(self, runner: DraftRunner, *, topk: int, num_steps: int, name: str = "") -> None:
        self._runner = runner
        self._topk = topk
        self._num_steps = num_steps
        self._name = name

    def inputs(self, rows_G: NDArray[np.int64], padding: int) -> dict[str, NDArray]:
        """Padding has rows that see nothing, and keys in the null slot. A tree that nothing was
        read for has no nodes, so whatever it attends to is nobody's."""
        trees = len(rows_G) + padding
        starts_G = np.maximum(self._runner.kv.lens_Q[rows_G] - 1, 0)
        nodes = self._runner.nodes_per_tree
        scratch = self._runner.kv.first_scratch + np.arange(len(rows_G) * nodes, dtype=np.int32)
        scratch_GN = np.pad(
            scratch.reshape(len(rows_G), nodes), ((0, padding), (0, 0)), constant_values=NULL_SLOT
        )
        real_G1 = np.minimum(np.arange(trees + 1), len(rows_G)) * self._topk
        return {
            "plan_rows": np.pad(rows_G, (0, padding)).astype(np.int32),
            "run_lens": np.ones(trees, dtype=np.int32),
            f"{self._name}starts": np.pad(starts_G, (0, padding)).astype(np.int32),
            f"{self._name}scratch": scratch_GN,
            **{
                f"offsets_{level}": (real_G1 * level).astype(np.int32)
                for level in range(1, self._num_steps)
            },
        }

    def longest(self, rows_G: NDArray[np.int64]) -> int:
        return int(self._runner.kv.lens_Q[rows_G].max(initial=0))

    def changes(self, rows_G: NDArray[np.int64]) -> dict[str, NDArray]:
        found = self._runner.table.changes(rows_G, self._runner.kv.lens_Q[rows_G])
        return {self._name + name: array for name, array in found.items()}

    def apply(self, tensors: Tensors, rows_G: NDArray[np.int64]) -> None:
        own = {
            name.removeprefix(self._name): tensor
            for name, tensor in tensors.items()
            if name.startswith(self._name)
        }
        self._runner.table.apply(own, rows_G, self._runner.kv.lens_Q[rows_G])

    def slots(self, level: int, inputs: Tensors) -> torch.Tensor:
        """int32 [P, N]: where keys and values of the nodes down to a level are."""
        return inputs[f"{self._name}scratch"][:, : level * self._topk]

    def positions(self, first_G: torch.Tensor, behind_N: torch.Tensor) -> torch.Tensor:
        """int64 [P, N]: so far behind each tree's first position. Those of what is none may be none
        either, and are moved to where there are any."""
        last = self._runner.table.tensor.shape[1] - 1
        return (first_G[:, None] + behind_N).clamp(0, last)

    def plan(
        self, level: int, nodes: DeviceNodes, inputs: Tensors, longest: int, *, new_levels: int
    ) -> AttentionPlan:
        """``new_levels``: so many last ones are run, the others were."""
        table = self._runner.table.tensor
        return AttentionPlan(
            req_to_token=table,
            rows_B=inputs["plan_rows"],
            starts_B=inputs[f"{self._name}starts"],
            run_lens_B=inputs["run_lens"],
            q_offsets_B1=inputs[f"offsets_{new_levels}"],
            node_offsets_B1=inputs[f"offsets_{level}"],
            node_masks_N=nodes.masks_GN.flatten(),
            node_slots_N=self.slots(level, inputs).flatten().contiguous(),  # a view of one column
            longest=min(longest, table.shape[1]),
        )
