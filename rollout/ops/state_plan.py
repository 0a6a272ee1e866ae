"""The state plan of a step: what recurrent layers need besides inputs and states.

Legend: B entries, T query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout.errors import InvalidInputError

NO_STATE = 0
"""The slot of no state. A row that continues it starts from zeros; a row that targets it stores
nothing. Never allocated."""


class StateRow(NamedTuple):
    """One row of a step, in the order of a plain recurrence."""

    row: int
    before: int | None  # slot of the state to continue, or NO_STATE; None: the row before's state
    target: int  # slot for the state after the row, or NO_STATE


@dataclass(kw_only=True, slots=True, eq=False)
class StatePlan:
    """The layout of one step's recurrent states, made by the runner and read by every recurrent
    layer. Never written to.

    Tensors are int32, contiguous, on one device. Entry b owns query rows
    [q_offsets[b], q_offsets[b + 1]), laid out as in AttentionPlan: its causal run, then its draft
    nodes. A row continues the state of its parent row. Rows of T past q_offsets[B] are padding:
    their output is zero, and they have no state.

    A run's row has the row before it as parent, a node the row of its parent node, and a run's
    first row -1 for the entry's source. Parents come before their children. A row whose state
    another row than the next one continues has a target. Targets are distinct, and no target is a
    source, so the states that a step began with survive its failure.
    """

    q_offsets_B1: torch.Tensor
    sources_B: torch.Tensor  # slot of the state before the run's first token, or NO_STATE
    parents_T: torch.Tensor  # row, or -1
    targets_T: torch.Tensor  # slot for the state after the row, or NO_STATE: not stored

    def __post_init__(self) -> None:
        for name in ("q_offsets_B1", "sources_B", "parents_T", "targets_T"):
            tensor = getattr(self, name)
            if tensor.dtype is not torch.int32:
                raise InvalidInputError(f"StatePlan.{name}", tensor.dtype, "must be torch.int32")
            if tensor.numel() and tensor.stride(-1) != 1:
                raise InvalidInputError(f"StatePlan.{name}", tensor.stride(), "must be contiguous")

    def rows(self) -> Iterator[StateRow]:
        """All rows except padding, in order. Waits for the plan's device."""
        offsets, sources = self.q_offsets_B1.tolist(), self.sources_B.tolist()
        parents, targets = self.parents_T.tolist(), self.targets_T.tolist()
        for entry, source in enumerate(sources):
            for row in range(offsets[entry], offsets[entry + 1]):
                parent = parents[row]
                before = source if parent < 0 else targets[parent]
                continues = parent >= 0 and parent == row - 1
                yield StateRow(row, None if continues else before, targets[row])
