"""The learned budget on made-up batches and machines: no model."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from rollout.types import Batch, EntryResult, FinishReason, Remaining, StepTimes, Tail
from spec_workers.budget import SelectedDrafts
from spec_workers.draft_tree import only_roots
from tests.helpers.budgets import (
    batch_of,
    chains,
    entry_of,
    make_budget,
    ramp,
    results_of,
)
from tests.helpers.requests import make_trees

FREE = StepTimes()  # nothing is learned of sampling and drafting


def proportional(rows):
    return 10.0 * rows


def step(budget, batch, prob, *, accepted=0, times=FREE) -> SelectedDrafts:
    budget.begin_step(batch)
    floors_B = budget.floors(batch)
    selected = budget.choose(batch, None if floors_B is None else chains(batch, prob))
    budget.observe(batch, selected, results_of(selected.trees, accepted), times)
    return selected


def run(budget, batch, *, steps, accepted=0, draft=0.0) -> list[bool]:
    """Whether drafting was open in each step. ``draft``: milliseconds that drafting takes, or a
    function of the step."""
    opened = []
    for number in range(steps):
        budget.begin_step(batch)
        opened.append(budget.is_open)
        draft_ms = (draft(number) if callable(draft) else draft) if opened[-1] else 0.0
        step(budget, batch, 0.9, accepted=accepted, times=StepTimes(draft=draft_ms))
    return opened


def observe_all_verified(budget, batch, trees, results) -> None:
    budget.begin_step(batch)
    selected = replace(budget.choose(batch, trees), trees=trees, values_N=trees.probs_N)
    budget.observe(batch, selected, results, FREE)


def sizes_of(selected) -> list[int]:
    return np.diff(selected.trees.offsets_B1).tolist()


def tail_of(limits, replaced=0.0):
    """The request of each number has so many tokens left."""
    return Tail(replaced=replaced, remaining=lambda each: Remaining(1e9, limits[each.request_id]))


def test_nothing_is_asked_for_nor_verified_where_no_node_can_pay():
    budget, batch = make_budget(proportional), batch_of(4)
    assert budget.choose(batch, chains(batch, 0.99)).trees.num_nodes == 0
    for _ in range(30):
        assert step(budget, batch, 0.9).proposed is None


def test_narrow_batches_have_deeper_trees():
    depths = []
    for width in (1, 2, 4, 8, 16, 64):
        budget, batch = make_budget(), batch_of(width)
        selected = budget.choose(batch, chains(batch, 0.8))
        num_nodes, forecast = selected.trees.num_nodes, selected.forecast
        depths.append(num_nodes / width)
        assert forecast.predicted_ms == pytest.approx(float(ramp(width + num_nodes)))
        assert budget.step_ms(batch, num_nodes) == pytest.approx(float(ramp(width + num_nodes)))
        assert forecast.plain_ms == pytest.approx(float(ramp(width)))
        gain = selected.values_N.sum() * ramp(width) / width
        gain -= forecast.predicted_ms - forecast.plain_ms
        assert forecast.predicted_gain_ms == pytest.approx(gain)
        assert gain >= 0
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 7
    assert depths[-1] < 1


def test_no_node_below_the_floor_would_have_been_chosen():
    rng = np.random.default_rng(1)
    for _ in range(50):
        slope = rng.uniform(0.0, 3.0)
        budget = make_budget(lambda rows, slope=slope: np.maximum(14.0, 10 + slope * rows))
        batch = batch_of(int(rng.integers(1, 9)))
        floors_B = budget.floors(batch)
        floor = 0.98 if floors_B is None else floors_B.min()
        step(budget, batch, 0.95)
        selected = budget.choose(batch, chains(batch, float(rng.uniform(0.3, 0.95))))
        assert selected.values_N.min(initial=1.0) >= min(floor, 1.0) - 1e-9 or floor == 0.02


def test_requests_are_trusted_each_for_itself():
    budget, batch = make_budget(), batch_of(2)
    for _ in range(40):
        trees = chains(batch, 0.7, 6)
        results = results_of(trees, accepted=3)
        results[1] = EntryResult(token_ids=[9], path=[], num_drafted=6)
        observe_all_verified(budget, batch, trees, results)
    ours, theirs = sizes_of(budget.choose(batch, chains(batch, 0.7)))
    assert ours > theirs
    budget.forget(batch.entries[1].request)
    assert sizes_of(budget.choose(batch, chains(batch, 0.7)))[1] > theirs
    budget.forget(batch.entries[0].request)
    assert np.ptp(sizes_of(budget.choose(batch, chains(batch, 0.7)))) <= 1


def test_prices_are_those_of_this_batch_whatever_came_before():
    rng = np.random.default_rng(2)
    budget, ever = make_budget(), [
        entry_of(k, samples=samples, slots=slots, run_len=run_len)
        for k in range(3)
        for samples in (True, False)
        for slots in (0, 3)
        for run_len in (1, 4)
    ]  # fmt: skip
    for _ in range(600):
        entries = {}
        for k in rng.integers(0, len(ever), rng.integers(1, 4)):
            entries[ever[k].request.request_id] = ever[k]
        batch = Batch(step=0, entries=list(entries.values()))
        budget, fresh = budget if budget.is_open else make_budget(), make_budget()
        selected, expected = budget.choose(batch, None), fresh.choose(batch, None)
        assert selected.forecast == expected.forecast
        np.testing.assert_array_equal(budget.floors(batch), fresh.floors(batch))
        np.testing.assert_array_equal(budget.token_ms(batch), fresh.token_ms(batch))
        some = any(entry.samples for entry in batch.entries)
        assert (budget.token_ms(batch) > 0).tolist() == [some] * len(batch.entries)
        if rng.random() < 0.5:
            budget.observe(batch, selected, results_of(selected.trees), FREE)


@pytest.mark.parametrize("options", [{"samples": False, "run_len": 30}, {"width": 0}])
def test_steps_that_sample_nothing_have_no_forecast_and_teach_nothing(options):
    budget, batch = make_budget(), batch_of(**{"width": 2} | options)
    before = budget.learned()
    assert budget.floors(batch) is None
    selected = budget.choose(batch, None)
    assert selected.forecast is None
    times = StepTimes(draft=1.0) if batch.entries else FREE
    budget.observe(batch, selected, [EntryResult() for _ in batch.entries], times)
    assert budget.learned() == before


def test_without_draft_slots_nothing_is_asked_for_and_the_gate_stays_open():
    budget, batch = make_budget(), batch_of(5, slots=0)
    assert budget.token_ms(batch) == pytest.approx(np.full(5, float(ramp(5)) / 5))
    for _ in range(100):
        selected = step(budget, batch, 0.9)
        assert selected.proposed is None
        assert selected.forecast.plain_ms == selected.forecast.predicted_ms == float(ramp(5))
    assert budget.is_open
    unknown = make_budget(is_known=False)
    assert unknown.token_ms(batch) is None
    assert unknown.choose(batch, None).forecast is None


@pytest.mark.parametrize("replaced", [0.0, 1.0])
def test_where_nobody_waits_the_longest_request_is_drafted_for(replaced):
    budget, batch = make_budget(lambda rows: 10.0 + rows), batch_of(4)
    trees = chains(batch, 0.8, 4)
    as_of_a_queue = sizes_of(budget.choose(batch, trees))
    assert as_of_a_queue[0] > 0
    waiting = budget.token_ms(batch).tolist()
    batch = batch_of(4)
    batch.tail = tail_of([50, 50, 90, 50], replaced)
    chosen = sizes_of(budget.choose(batch, trees))
    if replaced:
        assert chosen == as_of_a_queue
        return
    assert chosen[2] > as_of_a_queue[2]
    assert chosen[:2] + chosen[3:] == [0, 0, 0], "their tokens only save their own rows"
    floors_B = budget.floors(batch)
    assert floors_B[[0, 1, 3]].min() > 0.8
    assert floors_B[2] < 0.2
    assert budget.token_ms(batch_of(4)).tolist() == waiting, "asked in each step"


def test_a_token_that_saves_nothing_is_not_asked_for_even_where_rows_are_free():
    budget, batch = make_budget(lambda rows: 0 * rows + 9.0), batch_of(40)
    batch.tail = tail_of([1] + [4000] * 39)
    assert budget.token_ms(batch)[0] == 0.0
    floors_B = budget.floors(batch)
    assert floors_B[0] > 1.0
    assert floors_B[1:] == pytest.approx([0.02] * 39)


def test_it_closes_where_drafts_never_pay_and_opens_when_they_do():
    budget, batch = make_budget(), batch_of(4)
    opened = run(budget, batch, steps=2000, draft=0.3)
    assert sum(opened) < 0.08 * len(opened)
    while budget.is_open:  # it may be probing
        run(budget, batch, steps=1, draft=0.3)
    assert budget.floors(batch) is None
    budget.change_policy()
    run(budget, batch, steps=700, accepted=16)
    assert budget.is_open
    assert step(budget, batch, 0.9).trees.num_nodes > 0


def test_drafting_of_unknown_time_neither_closes_the_gate_nor_is_free():
    budget, batch = make_budget(), batch_of(1)
    assert all(run(budget, batch, steps=20, accepted=1, draft=math.nan)), "nothing is known of it"
    json.dumps(budget.learned(), allow_nan=False)
    selected = budget.choose(batch, only_roots(1))  # a proposal without nodes takes time too
    budget.observe(batch, selected, results_of(selected.trees), StepTimes(draft=20.0))
    assert budget.learned()["gate"]["gain"] < 0
    opened = run(budget, batch, steps=12, accepted=1, draft=math.nan)
    assert not all(opened), "it is taken to be the usual one"


@pytest.mark.parametrize(("idle_ms", "stays_open"), [(5.0, True), (0.0, False)])
def test_drafting_costs_what_it_takes_beyond_a_step_with_the_gate_closed(idle_ms, stays_open):
    """An accepted token saves 14 ms in four steps; each step spends 6 ms in drafting. A corpus
    takes tokens in whether its drafts are verified or not, a draft network need not."""
    budget, batch = make_budget(), batch_of(1)
    opened = []
    for number in range(2000):
        budget.begin_step(batch)
        opened.append(budget.is_open)
        proposes = budget.floors(batch) is not None and number not in (4, 8, 16)
        selected = budget.choose(batch, chains(batch, 0.5) if proposes else None)
        drafting = StepTimes(draft=6.0 if budget.is_open else idle_ms)
        accepted = number % 4 == 0
        budget.observe(batch, selected, results_of(selected.trees, accepted), drafting)
    assert all(opened[-200:]) if stays_open else sum(opened) < 200


@pytest.mark.parametrize("is_stopped", [False, True])
def test_nodes_are_judged_on_every_branch_unless_the_request_ended(is_stopped):
    budget, batch = make_budget(), batch_of(1)
    trees = make_trees([([1, 2, 3], [0, 0, 2])])
    trees.probs_N[:] = [0.4, 0.3, 0.2]
    trees.sources_N[:] = 1
    result = EntryResult(token_ids=[2, 3, 9], path=[2, 3], num_drafted=3)
    result.finish_reason = FinishReason.STOP if is_stopped else None
    observe_all_verified(budget, batch, trees, [result])
    table = {key: np.sum(value, 1) for key, value in budget.learned()["calibration"].items()
             if key != "sources"}  # fmt: skip
    assert table["expected"][1] == pytest.approx(0 if is_stopped else 0.9)
    assert table["accepted"][1] == (0 if is_stopped else 2)
    assert table["expected"][0] == table["accepted"][0] == 0
