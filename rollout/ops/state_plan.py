"""The state plan of a step: all that recurrent layers need besides inputs and states.

Legend: B entries, T query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout.errors import InvalidInputError

NO_STATE = 0
"""As a source: the state of no tokens, all zeros. As a target: nowhere. Never handed out."""


class StateRow(NamedTuple):
    """One row of a step, as a plain recurrence goes through them."""

    row: int
    before: int | None  # slot of the state it continues, or NO_STATE; None: that of the row before
    target: int


@dataclass(kw_only=True, slots=True, eq=False)
class StatePlan:
    """Made by the runner for one step, read by every recurrent layer, never written to.

    Tensors int32, contiguous, on one device. Entry b owns query rows
    [q_offsets[b], q_offsets[b + 1]), laid out as in AttentionPlan: its causal run, then its draft
    nodes. A row continues the state of its parent row. Rows of T past q_offsets[B] are padding:
    what they emit is zero, and they have no state.

    Chains and trees go one way: a run's row has the row before it as its parent, a node the row of
    its parent node, and a run's first row -1, which stands for the entry's source. Parents come
    before their children. A row that another than the next one continues has a target. Targets
    are distinct, and no target is a source: what a step began with is there when it has failed.
    """

    q_offsets_B1: torch.Tensor
    sources_B: torch.Tensor  # slot of the state before the run's first token, or NO_STATE
    parents_T: torch.Tensor  # row, or -1
    targets_T: torch.Tensor  # slot for the state after the row, or NO_STATE: it is not kept

    def __post_init__(self) -> None:
        for name in ("q_offsets_B1", "sources_B", "parents_T", "targets_T"):
            tensor = getattr(self, name)
            if tensor.dtype is not torch.int32:
                raise InvalidInputError(f"StatePlan.{name}", tensor.dtype, "must be torch.int32")
            if tensor.numel() and tensor.stride(-1) != 1:
                raise InvalidInputError(
                    f"StatePlan.{name}", tensor.stride(), "must be adjacent in memory"
                )

    def rows(self) -> Iterator[StateRow]:
        """All rows but padding, in order. Waits for the device the plan is on."""
        offsets, sources = self.q_offsets_B1.tolist(), self.sources_B.tolist()
        parents, targets = self.parents_T.tolist(), self.targets_T.tolist()
        for entry, source in enumerate(sources):
            for row in range(offsets[entry], offsets[entry + 1]):
                parent = parents[row]
                before = source if parent < 0 else targets[parent]
                continues = parent >= 0 and parent == row - 1
                yield StateRow(row, None if continues else before, targets[row])
