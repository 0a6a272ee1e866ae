"""Teaches the budget what a finished step cost, and books each request's share of its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from rollout.types import Batch, DraftTrees, EntryResult, StepTimes
from spec_workers.budget import DraftBudget, SelectedDrafts
from spec_workers.step.timer import SteadyPhases

_NEW = 0.1
"""The weight of the latest step in the time that learning takes: few steps teach costs, which takes
longer, and all pay for it."""


class StepLearning:
    """Tells the budget what a step cost and gave, and books its share to each request.

    Deferred, that is done when the next step is under way on a GPU, or when somebody asks before.
    """

    def __init__(self, budget: DraftBudget, *, is_deferred: bool) -> None:
        self.is_deferred = is_deferred
        self._budget = budget
        self._usual_ms = {False: 0.0, True: 0.0}  # by whether a step was asked for drafts
        self._pending: Callable[[], None] | None = None

    def observe(
        self,
        batch: Batch,
        selected: SelectedDrafts,
        results: list[EntryResult],
        times: StepTimes,
        steady: SteadyPhases,
    ) -> None:
        """A step ended. The budget is not told the time of a phase that was not ``steady``."""
        self.catch_up()
        known = times
        if not (steady.forward and steady.drafting):
            known = replace(
                times,
                forward=times.forward if steady.forward else math.nan,
                draft=times.draft if steady.drafting else math.nan,
            )
        self._pending = partial(self._learn, batch, selected, results, times, known)
        if not self.is_deferred:
            self.catch_up()

    def expected_ms(self, selected: SelectedDrafts) -> float:
        """Milliseconds that it takes to learn from a step of its kind, on average, which count as
        drafting; zero where that is deferred."""
        return self._usual_ms[selected.proposed is not None]

    def catch_up(self) -> None:
        """Learn from the last step, if that was deferred."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _learn(
        self,
        batch: Batch,
        selected: SelectedDrafts,
        results: list[EntryResult],
        times: StepTimes,
        known: StepTimes,
    ) -> None:
        started = time.perf_counter()
        self._budget.observe(batch, selected, results, known)
        if not self.is_deferred:
            took_ms = (time.perf_counter() - started) * 1e3
            was_asked = selected.proposed is not None
            self._usual_ms[was_asked] += _NEW * (took_ms - self._usual_ms[was_asked])
        count_step(batch, selected, results, times)


def count_step(
    batch: Batch, selected: SelectedDrafts, results: list[EntryResult], times: StepTimes
) -> None:
    """Adds to each request's stats its share of the step: by query rows, of drafting by entries."""
    entries, trees = batch.entries, selected.trees
    total_ms = times.draft + times.forward + times.sample
    row_share = 1.0 / max(1, batch.num_run_tokens + trees.num_nodes)
    entry_draft_ms = times.draft / max(1, len(entries))
    for entry, result in zip(entries, results, strict=True):
        stats = entry.request.stats
        share = row_share * (entry.run_len + result.num_drafted)
        stats.forward_ms += times.forward * share
        stats.total_ms += total_ms * share
        stats.draft_ms += entry_draft_ms
        if entry.samples:
            stats.verify_steps += 1
            stats.drafted += result.num_drafted
            stats.accepted += len(result.path)
    if selected.proposed is not None and selected.proposed.num_nodes:
        _count_drafts(batch, selected.proposed, selected, results, row_share, total_ms)


def _count_drafts(
    batch: Batch,
    proposed: DraftTrees,
    selected: SelectedDrafts,
    results: list[EntryResult],
    row_share: float,
    total_ms: float,
) -> None:
    proposed_B = np.diff(proposed.offsets_B1).tolist()
    expected = np.concatenate([[0.0], np.cumsum(selected.values_N)])
    expected_B = np.diff(expected[selected.trees.offsets_B1]).tolist()
    forecast = selected.forecast
    width = batch.num_sampling
    if forecast is not None and batch.num_run_tokens != width:
        total_ms = forecast.predicted_ms  # with prefill: as in the engine's metrics
    for b, (entry, result) in enumerate(zip(batch.entries, results, strict=True)):
        stats = entry.request.stats
        stats.proposed += proposed_B[b]
        stats.expected_accepted += expected_B[b]
        if forecast is None:
            continue
        share = row_share * (entry.run_len + result.num_drafted)
        token_ms = forecast.decode_ms / width
        extra_ms = (forecast.predicted_ms - forecast.plain_ms) * share
        stats.predicted_gain_ms += expected_B[b] * token_ms - extra_ms
        extra_ms = (total_ms - forecast.plain_ms) * share
        stats.gain_ms += len(result.path) * token_ms - extra_ms
