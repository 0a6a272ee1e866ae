"""The protocol of a budget, which chooses the draft nodes that a step verifies, and the fixed one.

Legend: B entries of a batch, N draft nodes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types import Batch, DraftTrees, EntryResult, Request, StepForecast, StepTimes
from spec_workers.draft_tree import only_roots


class BudgetKind(enum.StrEnum):
    LEARNED = "learned"
    FIXED = "fixed"


@dataclass(kw_only=True, slots=True)
class SelectedDrafts:
    """The nodes a step verifies, and what they are expected to give."""

    trees: DraftTrees
    values_N: NDArray[np.floating]  # of its nodes: probability of acceptance, corrected
    proposed: DraftTrees | None  # the drafts they were chosen from; None: no drafts were asked for
    forecast: StepForecast | None


class DraftBudget(Protocol):
    """Chooses how many draft nodes are verified. `SpecWorker.step` asks before it drafts and
    before it verifies; when the step has ended, the budget observes what was accepted."""

    @property
    def may_draft(self) -> bool:
        """Whether the next step may draft, whose batch is not known."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the step that was begun may draft."""
        ...

    def begin_step(self, batch: Batch) -> None: ...

    def floors(self, batch: Batch) -> NDArray[np.float64] | None:
        """The least probability at which a node of each entry could pay: [B], above 1 where none
        can. None: propose nothing."""
        ...

    def token_ms(self, batch: Batch) -> NDArray[np.float64] | None:
        """Milliseconds of plain decoding that one emitted token of each entry saves: [B]. None
        while costs are not known, and of a budget that learns none."""
        ...

    def wants_plain_step(self) -> bool:
        """Whether a step that could draft decodes plainly, for comparison. Asked once per step."""
        ...

    def choose(self, batch: Batch, proposed: DraftTrees | None) -> SelectedDrafts:
        """Choose the nodes to verify. ``proposed``: None where no drafts were asked for."""
        ...

    def observe(
        self, batch: Batch, selected: SelectedDrafts, results: list[EntryResult], times: StepTimes
    ) -> None:
        """Learn from a finished step. ``times``: NaN for a phase whose timing is not
        steady-state."""
        ...

    def change_policy(self) -> None:
        """Note that the target's weights changed."""
        ...

    def forget(self, request: Request) -> None: ...

    def learned(self) -> dict[str, Any]: ...


class FixedBudget:
    """The budget that verifies whatever is proposed, and learns nothing."""

    may_draft = is_open = True

    def __init__(self, min_probability: float = 0.0) -> None:
        self._min_probability = min_probability

    def begin_step(self, batch: Batch) -> None:
        pass

    def floors(self, batch: Batch) -> NDArray[np.float64] | None:
        return np.full(len(batch.entries), self._min_probability)

    def token_ms(self, batch: Batch) -> None:
        return None

    def wants_plain_step(self) -> bool:
        return False

    def choose(self, batch: Batch, proposed: DraftTrees | None) -> SelectedDrafts:
        trees = only_roots(len(batch.entries)) if proposed is None else proposed
        return SelectedDrafts(
            trees=trees,
            values_N=trees.probs_N,
            proposed=proposed,
            forecast=None,
        )

    def observe(
        self, batch: Batch, selected: SelectedDrafts, results: list[EntryResult], times: StepTimes
    ) -> None:
        pass

    def change_policy(self) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def learned(self) -> dict[str, Any]:
        return {}
