"""The levels of a chain's trees on a device: each step runs all nodes so far.

Legend: G trees, P of a shape, W nodes of a level, N nodes so far, M those of the level before, E
hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from spec_workers.neural.chain_state import ChainState
from spec_workers.neural.device_growth import DeviceNodes
from spec_workers.neural.draft_runner import DraftRunner
from spec_workers.neural.eagle_drafter import gathered
from spec_workers.neural.level_plans import LevelPlans

Tensors = dict[str, torch.Tensor]


class ChainLevels:
    """See `Levels`."""

    def __init__(self, runners: Sequence[DraftRunner], state: ChainState, *, topk: int) -> None:
        self._runners = runners
        self._state = state
        self._topk = topk
        self._plans = [
            LevelPlans(runner, topk=topk, num_steps=len(runners), name=f"step_{step}_")
            for step, runner in enumerate(runners)
        ]

    def inputs(self, rows_G: NDArray[np.int64], padding: int) -> dict[str, NDArray]:
        arrays: dict[str, NDArray] = {}
        for plans in self._plans[1:]:
            arrays |= plans.inputs(rows_G, padding)
        return arrays

    def longest(self, rows_G: NDArray[np.int64]) -> int:
        return max((plans.longest(rows_G) for plans in self._plans[1:]), default=0)

    def changes(self, rows_G: NDArray[np.int64]) -> dict[str, NDArray]:
        arrays: dict[str, NDArray] = {}
        for plans in self._plans[1:]:
            arrays |= plans.changes(rows_G)
        return arrays

    def apply(self, tensors: Tensors, rows_G: NDArray[np.int64]) -> None:
        for plans in self._plans[1:]:
            plans.apply(tensors, rows_G)

    def roots(self, inputs: Tensors) -> torch.Tensor:
        return self._state.hidden(0, inputs["rows"])[:, None]

    def run(
        self,
        level: int,
        nodes: DeviceNodes,
        before_GME: torch.Tensor,
        inputs: Tensors,
        longest: int,
    ) -> torch.Tensor:
        plans, runner = self._plans[level], self._runners[level]
        root_G1E = self._state.hidden(level - 1, inputs["rows"])[:, None]
        above_GE = root_G1E if level == 1 else torch.cat([root_G1E, before_GME], dim=1)
        hidden_GNE = gathered(above_GE, nodes.parents_GN + 1)
        # A node of depth d is at d - 1 positions behind the step's last known one.
        nodes_N = torch.arange(level * self._topk, device=hidden_GNE.device)
        hidden_TE = runner.forward(
            nodes.tokens_GN.flatten(),
            hidden_GNE.flatten(0, 1),
            plans.positions(inputs["ends"] - 1 - level, nodes_N // self._topk).flatten(),
            plans.slots(level, inputs).flatten().long(),
            plans.plan(level, nodes, inputs, longest, new_levels=level),
        )
        return hidden_TE.view(hidden_GNE.shape)

    def logits(self, level: int, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._runners[level].logits(hidden_RE)
