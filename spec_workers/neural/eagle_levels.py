"""The levels of an EAGLE draft's trees on a device: each runs its new nodes.

Legend: G trees, P of a shape, W nodes of a level, F rows of the level before, N nodes so far, E
hidden.
"""

from __future__ import annotations

import torch

from spec_workers.neural.device_growth import DeviceNodes
from spec_workers.neural.draft_roots import DraftRoots
from spec_workers.neural.draft_runner import DraftRunner
from spec_workers.neural.level_plans import LevelPlans

Tensors = dict[str, torch.Tensor]


class EagleLevels:
    """See `Levels`."""

    def __init__(
        self, runner: DraftRunner, roots: DraftRoots, *, topk: int, num_steps: int
    ) -> None:
        self._runner = runner
        self._roots = roots
        self._topk = topk
        self._plans = LevelPlans(runner, topk=topk, num_steps=num_steps)
        self.inputs = self._plans.inputs
        self.longest = self._plans.longest
        self.changes = self._plans.changes
        self.apply = self._plans.apply

    def roots(self, inputs: Tensors) -> torch.Tensor:
        return self._roots.hidden(inputs["rows"])[:, None]

    def run(
        self,
        level: int,
        nodes: DeviceNodes,
        before_GFE: torch.Tensor,
        inputs: Tensors,
        longest: int,
    ) -> torch.Tensor:
        width = self._topk
        parents_GW = (
            nodes.parents_GN[:, -width:] - (level - 2) * width
            if level > 1
            else (torch.zeros_like(nodes.parents_GN))
        )
        hidden_GWE = gathered(before_GFE, parents_GW)
        none_W = torch.zeros(width, dtype=torch.int64, device=hidden_GWE.device)
        hidden_TE = self._runner.forward(
            nodes.tokens_GN[:, -width:].flatten(),
            hidden_GWE.flatten(0, 1),
            self._plans.positions(inputs["ends"] + level - 2, none_W).flatten(),
            self._plans.slots(level, inputs)[:, -width:].flatten().long(),
            self._plans.plan(level, nodes, inputs, longest, new_levels=1),
        )
        return hidden_TE.view(hidden_GWE.shape)

    def logits(self, level: int, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._runner.logits(hidden_RE)


def gathered(hidden_GFE: torch.Tensor, rows_GW: torch.Tensor) -> torch.Tensor:
    """[G, W, E]: of each tree these rows."""
    return hidden_GFE.gather(1, rows_GW[:, :, None].expand(-1, -1, hidden_GFE.shape[2]))
