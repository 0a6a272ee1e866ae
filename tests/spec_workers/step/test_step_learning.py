"""A step's time is booked to its requests, all of it."""

from __future__ import annotations

import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from rollout.types import Batch, EntryResult, StepForecast, StepTimes
from spec_workers.budget import FixedBudget, SelectedDrafts
from spec_workers.draft_tree import first_nodes
from spec_workers.step.learning import count_step
from spec_workers.step.timer import StepTimer
from tests.helpers.budgets import batch_of, chains, entry_of, make_budget, results_of
from tests.helpers.requests import make_trees

TIMES = StepTimes(draft=1.5, forward=20.0, sample=3.0)
FORECAST = StepForecast(predicted_ms=22.0, plain_ms=18.0, decode_ms=15.0, predicted_gain_ms=9.0)


def booked(batch, name):
    return sum(getattr(entry.request.stats, name) for entry in batch.entries)


def mixed_batch():
    """Two that decode, one at the end of its prompt, one in the middle of it."""
    return Batch(
        step=0,
        entries=[
            entry_of(0),
            entry_of(1),
            entry_of(2, run_len=9),
            entry_of(3, run_len=30, samples=False),
        ],
    )


def drafted_step(batch):
    proposed = make_trees([([1, 2, 3], [0, 1, 2]), ([4, 5], [0, 0]), ([6], [0]), ([], [])])
    trees, kept_N = first_nodes(proposed, np.array([2, 2, 0, 0]))
    values_N = np.linspace(0.9, 0.2, 6)[kept_N]
    selected = SelectedDrafts(trees=trees, values_N=values_N, proposed=proposed, forecast=FORECAST)
    results = [
        EntryResult(token_ids=[1, 2, 7], path=[1, 2], num_drafted=2),
        EntryResult(token_ids=[5, 7], path=[2], num_drafted=2),
        EntryResult(token_ids=[9]),
        EntryResult(),
    ]
    return selected, results


def test_shares_are_by_rows_and_add_up_to_the_whole_step():
    batch = mixed_batch()
    selected, results = drafted_step(batch)
    count_step(batch, selected, results, TIMES)
    assert booked(batch, "forward_ms") == pytest.approx(TIMES.forward)
    assert booked(batch, "draft_ms") == pytest.approx(TIMES.draft)
    assert booked(batch, "total_ms") == pytest.approx(24.5)
    assert booked(batch, "proposed") == 6
    assert booked(batch, "drafted") == 4
    assert booked(batch, "accepted") == 3
    assert booked(batch, "verify_steps") == 3
    assert booked(batch, "expected_accepted") == pytest.approx(selected.values_N.sum())
    # Tokens by what a plain one costs, less what the step took longer: with prefill, by forecast.
    gain = 3 * 15.0 / 3 - (22.0 - 18.0)
    predicted = selected.values_N.sum() * 15.0 / 3 - (22.0 - 18.0)
    assert booked(batch, "gain_ms") == pytest.approx(gain)
    assert booked(batch, "predicted_gain_ms") == pytest.approx(predicted)
    shares = [entry.request.stats.forward_ms / TIMES.forward for entry in batch.entries]
    assert shares == pytest.approx([3 / 45, 3 / 45, 9 / 45, 30 / 45])
    assert batch.entries[3].request.stats.verify_steps == 0
    for _ in range(2):
        count_step(batch, selected, results, TIMES)
    assert booked(batch, "total_ms") == pytest.approx(3 * 24.5)
    assert booked(batch, "verify_steps") == 9
    count_step(
        Batch(step=0, entries=[]), FixedBudget().choose(Batch(step=0, entries=[]), None), [], TIMES
    )  # divides by nothing


def test_gains_are_those_of_the_forecast_and_none_without_drafts():
    batch, budget = mixed_batch(), FixedBudget()
    selected = budget.choose(batch, None)
    count_step(batch, selected, results_of(selected.trees), TIMES)
    assert booked(batch, "gain_ms") == 0
    assert booked(batch, "total_ms") == pytest.approx(24.5)
    selected = make_budget().choose(batch, None)
    count_step(batch, selected, results_of(selected.trees), TIMES)
    assert booked(batch, "gain_ms") == booked(batch, "predicted_gain_ms") == 0
    batch, budget = batch_of(3), make_budget()
    selected = budget.choose(batch, chains(batch, 0.9))
    assert selected.trees.num_nodes
    count_step(batch, selected, results_of(selected.trees, 2), TIMES)
    assert booked(batch, "predicted_gain_ms") == pytest.approx(selected.forecast.predicted_gain_ms)


def test_every_phase_is_counted_once() -> None:
    started = time.perf_counter()
    timer = StepTimer(torch.device("cpu"))
    phases = (timer.drafting, timer.forward, nullcontext, timer.drafting, nullcontext)
    for milliseconds, phase in enumerate(phases, start=1):
        with phase():
            time.sleep(milliseconds / 1e3)
    times = timer.end()
    total_ms = (time.perf_counter() - started) * 1e3
    assert times.draft >= 1 + 4
    assert times.forward >= 2
    assert times.sample >= 3 + 5
    assert times.draft + times.forward + times.sample <= total_ms
