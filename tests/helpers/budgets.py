"""Learned budgets on made-up machines, with batches and drafts made by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollout.types import Batch, DraftTrees, EntryResult, Scheduled
from spec_workers.budget import LearnedBudget
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.step_costs import StepCosts
from tests.helpers.requests import make_request, make_trees

SOURCES = ("group", "live")

Times = Callable[[np.ndarray], np.ndarray]
"""Milliseconds of a forward by its rows."""


class Machine(CostCurve):
    """A cost curve with given times, which learns nothing."""

    def __init__(self, times: Times, *, is_known: bool = True) -> None:
        super().__init__(1, 4096)
        self.times = times
        self._is_known = is_known

    @property
    def is_known(self) -> bool:
        return self._is_known

    def observe(self, num_rows, milliseconds) -> float:
        return 0.0

    def milliseconds(self, rows):
        return np.asarray(self.times(np.asarray(rows, dtype=np.float64)))


def ramp(rows: np.ndarray) -> np.ndarray:
    """Memory-bound, then compute-bound."""
    return np.maximum(14.0, 8.0 + 0.8 * rows)


def make_budget(times: Times = ramp, sources=SOURCES, *, is_known=True) -> LearnedBudget:
    return LearnedBudget(StepCosts(Machine(times, is_known=is_known)), sources, 0.02)


def entry_of(request_id: int, *, samples=True, slots=16, run_len=1) -> Scheduled:
    length = run_len + (not samples)
    return Scheduled(
        request=make_request([5] * length, request_id=request_id),
        start=0,
        run_len=run_len,
        draft_slots=np.arange(slots if samples else 0, dtype=np.int32),
    )


def batch_of(width: int, **options) -> Batch:
    return Batch(step=0, entries=[entry_of(number, **options) for number in range(width)])


def chains(batch: Batch, prob: float, length: int = 16) -> DraftTrees:
    """A chain for each entry, each node as probable given its parent."""
    size = min(length, *(entry.draft_slots.size for entry in batch.entries))
    trees = make_trees([(list(range(size)), list(range(size))) for _ in batch.entries])
    trees.probs_N[:] = np.tile(prob ** np.arange(1, size + 1), len(batch.entries))
    return trees


def results_of(trees: DraftTrees, accepted: int = 0) -> list[EntryResult]:
    """Each entry accepts so many first nodes of its chain."""
    return [
        EntryResult(
            token_ids=[0] * (1 + min(accepted, size)),
            path=list(range(1, 1 + min(accepted, size))),
            num_drafted=size,
        )
        for size in np.diff(trees.offsets_B1).tolist()
    ]
