"""Steps of recurrent layers: runs and draft trees, their plans, and where their states lie.

Legend: T rows, S slots.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from rollout.ops.state_plan import NO_STATE, StatePlan


@dataclass(kw_only=True, slots=True)
class Step:
    """One entry's part: a run, then nodes, ``nodes[j]`` being the parent of node j + 1 (0: root).

    ``source`` and the targets are slots; ``checkpoints`` are places in the run with a target.
    """

    run_len: int
    nodes: list[int] = field(default_factory=list)
    source: int = NO_STATE
    checkpoints: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.run_len + len(self.nodes)

    def path(self, node: int) -> list[int]:
        """Tree nodes from the root's first child to ``node``."""
        return [] if node == 0 else [*self.path(self.nodes[node - 1]), node]

    def row_of(self, node: int) -> int:
        return self.run_len - 1 + node


def make_plan(steps: list[Step], first_slot: int, device: torch.device | str = "cpu") -> StatePlan:
    """Every node and every run's end has a target, from ``first_slot`` on, in a shuffled order."""
    count = sum(step.num_rows for step in steps)
    slots = list(range(first_slot, first_slot + count))
    random.Random(count).shuffle(slots)
    offsets, parents, targets = [0], [], []
    for step in steps:
        start = offsets[-1]
        offsets.append(start + step.num_rows)
        for row in range(step.run_len):
            parents.append(start + row - 1 if row else -1)
            kept = row == step.run_len - 1 or row in step.checkpoints
            targets.append(slots.pop() if kept else NO_STATE)
        for parent in step.nodes:
            parents.append(start + step.row_of(parent))
            targets.append(slots.pop())

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StatePlan(
        q_offsets_B1=int32(offsets),
        sources_B=int32([step.source for step in steps]),
        parents_T=int32(parents),
        targets_T=int32(targets),
    )


def random_steps(seed: int, count: int, sources: int) -> list[Step]:
    """Runs of 1 to 9 tokens, some with trees; sources are distinct slots from 1, or none."""
    rng = random.Random(seed)
    slots = rng.sample(range(1, sources + 1), count)
    steps = []
    for slot in slots:
        run_len, nodes = rng.choice([1, 1, 2, 9]), rng.choice([0, 3, 8])
        steps.append(
            Step(
                run_len=run_len,
                nodes=[rng.randint(max(0, j - 3), j) for j in range(nodes)],
                source=rng.choice([slot, slot, NO_STATE]),
                checkpoints=[row for row in range(run_len - 1) if rng.random() < 0.3],
            )
        )
    return steps
