"""The budget on made-up batches and machines: no model."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from rollout.types import (
    Batch,
    DraftTrees,
    EntryResult,
    FinishReason,
    Remaining,
    StepTimes,
    Tail,
)
from spec_workers.budget import LearnedBudget, SelectedDrafts
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.node_values import NodeValues
from spec_workers.budget.step_cost import StepCost
from spec_workers.draft_tree import only_roots
from tests.helpers.budgets import (
    SOURCES,
    batch_of,
    chains,
    entry_of,
    make_budget,
    ramp,
    results_of,
)
from tests.helpers.gates import ShutGate
from tests.helpers.requests import make_trees

FREE = StepTimes()  # nothing to be learned of sampling and drafting


def proportional(rows):
    return 10.0 * rows


def step(budget, batch, prob, *, accepted=0, times=FREE) -> SelectedDrafts:
    floors_B = budget.floors(batch)
    selected = budget.choose(batch, None if floors_B is None else chains(batch, prob))
    budget.observe(batch, selected, results_of(selected.trees, accepted), times)
    return selected


def all_verified(budget, batch, trees: DraftTrees) -> SelectedDrafts:
    return replace(budget.choose(batch, trees), trees=trees, values_N=trees.probs_N)


def test_nothing_is_verified_where_nodes_cost_more_than_they_bring():
    budget, batch = make_budget(proportional), batch_of(4)
    assert budget.floors(batch) is None
    assert budget.choose(batch, chains(batch, 0.99)).trees.num_nodes == 0


def test_free_nodes_are_verified_however_improbable():
    budget, batch = make_budget(lambda rows: 0 * rows + 9.0), batch_of(2)
    assert budget.floors(batch) == pytest.approx([0.02, 0.02])
    step(budget, batch, 0.9)  # some: from now on a little is enough
    assert budget.choose(batch, chains(batch, 0.2)).trees.num_nodes == 32


def test_narrow_batches_have_deeper_trees():
    depths = []
    for width in (1, 2, 4, 8, 16, 64):
        budget, batch = make_budget(), batch_of(width)
        trees = budget.choose(batch, chains(batch, 0.8)).trees
        depths.append(trees.num_nodes / width)
        forecast = budget.choose(batch, chains(batch, 0.8)).forecast
        assert forecast.predicted_ms == pytest.approx(float(ramp(width + trees.num_nodes)))
        assert forecast.plain_ms == pytest.approx(float(ramp(width)))
        assert forecast.predicted_gain_ms >= 0
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 7
    assert depths[-1] < 1


def test_no_node_below_the_floor_would_have_been_bought():
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


def test_it_begins_later_than_it_goes_on():
    budget, batch = make_budget(lambda rows: 10 + 0.05 * (rows - 1)), batch_of(1, slots=1)
    little = chains(batch, 0.015)  # spares 0.15 ms, costs 0.05: 1 % of the step

    def num_nodes():
        return budget.choose(batch, little).trees.num_nodes

    assert num_nodes() == 0
    step(budget, batch, 0.9)
    assert num_nodes() == 1
    turn = budget.choose(batch, None)  # a plain turn between drafting steps changes nothing
    budget.observe(batch, turn, results_of(turn.trees), FREE)
    assert num_nodes() == 1
    none = budget.choose(batch, only_roots(1))
    budget.observe(batch, none, results_of(none.trees), FREE)
    assert num_nodes() == 0


def test_prices_are_those_of_this_batch_whatever_came_before():
    """The prices equal those of a budget that was never asked before."""
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
        fresh = make_budget()
        selected, expected = budget.choose(batch, None), fresh.choose(batch, None)
        assert selected.forecast == expected.forecast
        np.testing.assert_array_equal(budget.floors(batch), fresh.floors(batch))
        np.testing.assert_array_equal(budget.token_ms(batch), fresh.token_ms(batch))
        some = any(entry.samples for entry in batch.entries)
        assert (budget.token_ms(batch) > 0).tolist() == [some] * len(batch.entries)
        if rng.random() < 0.5:
            budget.observe(batch, selected, results_of(selected.trees), FREE)


def test_prices_are_looked_up_while_the_batch_is_the_same():
    asked = []
    budget, batch = make_budget(lambda rows: asked.append(1) or ramp(rows)), batch_of(4)
    step(budget, batch, 0.8)
    once = len(asked)
    for _ in range(14):
        step(budget, batch, 0.8)
    assert len(asked) == once
    for _ in range(3):
        step(budget, batch, 0.8)
    assert len(asked) == 2 * once


def test_prefill_alone():
    budget = make_budget()
    batch = batch_of(2, samples=False, run_len=30)
    assert budget.floors(batch) is None
    selected = budget.choose(batch, None)
    assert selected.forecast is None
    assert selected.trees.num_nodes == 0
    before = budget.learned()["gate"]
    budget.observe(batch, selected, [EntryResult(), EntryResult()], FREE)
    assert budget.learned()["gate"] == before
    assert budget.cost.curve.seen == 0


def test_a_batch_of_nobody():
    budget, batch = make_budget(), Batch(step=0, entries=[])
    assert budget.floors(batch) is None
    selected = budget.choose(batch, None)
    budget.observe(batch, selected, [], FREE)
    assert selected.forecast is None


def test_without_draft_slots_nothing_is_asked_for_and_the_forecast_is_that_of_the_step():
    budget, batch = make_budget(), batch_of(5, slots=0)
    assert budget.floors(batch) is None
    assert budget.token_ms(batch) == pytest.approx(np.full(5, float(ramp(5)) / 5))
    for _ in range(100):
        selected = step(budget, batch, 0.9)
        assert selected.proposed is None
        assert selected.forecast.plain_ms == selected.forecast.predicted_ms == float(ramp(5))
    assert budget.is_open


def test_entries_that_ended_are_not_judged():
    budget, batch = make_budget(), batch_of(2)
    trees = chains(batch, 0.5, 3)
    trees.sources_N[3:] = 1
    selected = all_verified(budget, batch, trees)
    results = results_of(trees, accepted=2)
    results[1].finish_reason = FinishReason.STOP
    budget.observe(batch, selected, results, FREE)
    values = budget.learned()["values"]
    assert values["expected"][0] == pytest.approx([0.5, 0.25, 0.125, 0.0])
    assert values["accepted"][0] == [1.0, 1.0, 0.0, 0.0]
    assert values["expected"][1] == values["accepted"][1] == [0.0] * 4


def test_requests_are_trusted_each_for_itself():
    """The one that goes its own way is drafted less for, until it ends."""
    budget, batch = make_budget(), batch_of(2)
    for _ in range(40):
        trees = chains(batch, 0.7, 6)
        selected = all_verified(budget, batch, trees)
        results = results_of(trees, accepted=3)
        results[1] = EntryResult(token_ids=[9], path=[], num_drafted=6)
        budget.observe(batch, selected, results, FREE)
    chosen = budget.choose(batch, chains(batch, 0.7)).trees
    ours, theirs = np.diff(chosen.offsets_B1)
    assert ours > theirs
    budget.forget(batch.entries[1].request)
    chosen = budget.choose(batch, chains(batch, 0.7)).trees
    assert np.diff(chosen.offsets_B1)[1] > theirs
    budget.forget(batch.entries[0].request)
    assert np.ptp(np.diff(budget.choose(batch, chains(batch, 0.7)).trees.offsets_B1)) <= 1


def test_branches_not_taken_are_judged():
    budget, batch = make_budget(), batch_of(1)
    trees = make_trees([([1, 2, 3], [0, 0, 2])])
    trees.probs_N[:] = [0.4, 0.3, 0.2]
    selected = all_verified(budget, batch, trees)
    result = EntryResult(token_ids=[2, 3, 9], path=[2, 3], num_drafted=3)
    budget.observe(batch, selected, [result], FREE)
    values = budget.learned()["values"]
    assert values["expected"][0] == pytest.approx([0.7, 0.2, 0, 0])
    assert values["accepted"][0] == [1.0, 1.0, 0.0, 0.0]


def test_it_closes_where_drafts_never_pay_and_opens_when_they_do():
    budget, batch = make_budget(), batch_of(4)
    drafting = StepTimes(draft=0.3)
    opened = []
    for _ in range(2000):
        opened.append(budget.is_open)
        selected = step(budget, batch, 0.9, times=drafting if opened[-1] else FREE)
        assert opened[-1] or selected.proposed is None
    assert sum(opened) < 0.08 * len(opened)
    for _ in range(700):
        step(budget, batch, 0.9, accepted=16, times=FREE)
    assert budget.is_open
    assert step(budget, batch, 0.9).trees.num_nodes > 0


def test_costs_are_learned_from_the_first_steps_and_then_from_some():
    budget, batch = make_budget(), batch_of(2)
    curve = budget.cost.curve
    for _ in range(128):
        step(budget, batch, 0.5, accepted=16)
    assert curve.seen == curve.steps == 128
    for _ in range(401):
        step(budget, batch, 0.5, accepted=16)
    assert budget.is_open
    assert (curve.seen, curve.steps) == (128 + 2 * 400 // 8 + 1, 529)


@pytest.mark.parametrize("apart", range(8))
def test_costs_are_learned_from_every_plain_turn(apart):
    """Steps that cannot draft shift plain turns against the steps that teach."""
    budget, batch, prefill = make_budget(), batch_of(2), batch_of(2, slots=0)
    for number in range(136 + apart):
        step(budget, prefill if number < 8 + apart else batch, 0.9, accepted=16)
    assert budget.is_open
    taught = []
    budget.cost.observe = lambda *, proposed, **_: taught.append(proposed)
    plain = 0
    for _ in range(64 * 8):
        turns = budget.floors(batch) is None or budget.wants_plain_step()
        selected = budget.choose(batch, None if turns else chains(batch, 0.9))
        budget.observe(batch, selected, results_of(selected.trees, 16), FREE)
        plain += turns
    assert taught.count(False) == plain == 8 + 4, "four more of the first turns"


def test_where_drafting_does_not_pay_they_are_learned_from_fewer():
    budget, batch = make_budget(), batch_of(2)
    budget._gate = ShutGate()
    for _ in range(128 + 641):
        step(budget, batch, 0.5)
    assert (budget.cost.curve.seen, budget.cost.curve.steps) == (128 + 2 * 640 // 128 + 1, 769)


def untaught():
    return LearnedBudget(StepCost("here", CostCurve(1, 256, 512)), NodeValues(SOURCES), 0.02)


def learned_for_real():
    budget, batch = untaught(), batch_of(4)
    for _ in range(30):
        step(budget, batch, 0.6, accepted=1, times=StepTimes(draft=0.3, forward=12.0, sample=1.0))
    return budget


def test_restored_it_is_the_same():
    learned = json.loads(json.dumps(learned_for_real().learned()))
    budget = untaught()
    assert not budget.cost.is_known
    budget.restore(learned)
    assert budget.cost.is_known
    again = budget.learned()
    assert again["values"] == learned["values"]
    assert again["request_ms"] == learned["request_ms"]
    np.testing.assert_allclose(
        again["cost"]["milliseconds"], learned["cost"]["milliseconds"], rtol=1e-4
    )


@pytest.mark.parametrize(
    "damage",
    [{"cost": {}}, {"request_ms": {}}, {"elsewhere": 1}, {"values": []}, {"values": {}}],
)
def test_what_is_damaged_is_refused_whole(damage):
    learned = learned_for_real().learned()
    budget = untaught()
    before = budget.learned()
    with pytest.raises(ValueError, match=r"\w"):
        budget.restore(learned | damage)
    assert budget.learned() == before


def test_a_new_policy_halves_what_was_learned_of_drafts():
    budget = learned_for_real()
    before = np.array(budget.learned()["values"]["expected"])
    budget.change_policy()
    np.testing.assert_allclose(budget.learned()["values"]["expected"], before / 2, atol=1e-3)


def test_roots_alone_are_a_proposal():
    """Nothing was found; that was asked for all the same, and took its time."""
    budget, batch = make_budget(), batch_of(2)
    selected = budget.choose(batch, only_roots(2))
    assert selected.proposed.num_nodes == 0
    budget.observe(batch, selected, results_of(selected.trees), StepTimes(draft=0.5))
    assert budget.learned()["gate"]["gain"] < 0


def test_what_was_taken_for_hopeless_can_rise_again():
    """The token emitted decides every child of the root, though none is verified any more."""
    budget, batch = make_budget(proportional), batch_of(4)
    proposed = chains(batch, 0.9, length=1)  # of token 0

    def corrected_after(token):
        for _ in range(300):
            selected = budget.choose(batch, proposed)
            results = [EntryResult(token_ids=[token]) for _ in batch.entries]
            budget.observe(batch, selected, results, FREE)
        trees = (proposed.probs_N, proposed.sources_N, proposed.depths_N)
        trust_B = budget._trust.ratios([entry.request.request_id for entry in batch.entries])
        return float((budget._values.corrected(*trees) * trust_B).max())

    assert corrected_after(token=3) < 0.1
    assert corrected_after(token=0) > 0.8


def test_drafting_of_which_no_time_is_known_closes_nothing_and_is_not_free():
    budget, batch = make_budget(), batch_of(1)
    compiling = StepTimes(draft=math.nan)
    for _ in range(20):
        step(budget, batch, 0.9, accepted=1, times=compiling)
    assert budget.is_open
    json.dumps(budget.learned(), allow_nan=False)
    gained = []
    budget._gate.observe = lambda width, gain, *_: gained.append(gain)
    step(budget, batch, 0.9, accepted=1, times=compiling)
    assert gained == []  # nobody knows what it takes
    for _ in range(3):
        step(budget, batch, 0.9, accepted=1, times=StepTimes(draft=3.0))
    step(budget, batch, 0.9, accepted=1, times=compiling)
    assert len(gained) == 4
    assert gained[-1] == pytest.approx(gained[-2], rel=0.5)
    assert all(map(math.isfinite, gained))


@pytest.mark.parametrize(("usual_ms", "stays_open"), [(3.0, True), (30.0, False)])
def test_slow_drafting_now_and_then_does_not_close_it(usual_ms, stays_open):
    """A busy machine takes a hundred times as long in one step of twenty; one whose drafting is
    as slow in every step is another matter."""
    budget, batch = make_budget(), batch_of(1)
    opened = []
    for number in range(300):
        opened.append(budget.is_open)
        drafting = StepTimes(draft=300.0 if number % 20 == 5 else usual_ms)
        step(budget, batch, 0.9, accepted=1, times=drafting if opened[-1] else FREE)
    assert all(opened) == stays_open


@pytest.mark.parametrize(("reads_while_open", "stays_open"), [(False, True), (True, False)])
def test_what_a_draft_reads_is_a_cost_of_drafting(reads_while_open, stays_open):
    """An accepted token saves 14 ms in two steps. Each step spends 6 ms in drafting, 5 of them in
    steps that propose nothing too: a corpus takes tokens in as long whether its drafts are verified
    or not, a draft network need not read while the gate is shut."""
    budget, batch = make_budget(reads_while_open=reads_while_open), batch_of(1)
    opened = []
    for number in range(400):
        opened.append(budget.is_open)
        proposes = budget.floors(batch) is not None and number not in (4, 8, 16)
        selected = budget.choose(batch, chains(batch, 0.5) if proposes else None)
        idle_ms = 0.0 if reads_while_open else 5.0
        drafting = StepTimes(draft=6.0 if proposes else 5.0 if budget.is_open else idle_ms)
        accepted = number % 4 == 0
        budget.observe(batch, selected, results_of(selected.trees, accepted), drafting)
    assert all(opened) == stays_open
    assert sum(opened) < 100 or stays_open


def test_a_plain_step_that_a_draft_reads_is_predicted_as_one():
    """The time that drafts saved goes by the pace of plain steps: one that a draft reads takes
    longer than decoding without any draft would."""
    budget, batch = make_budget(reads_while_open=True), batch_of(1)
    for _ in range(30):
        for proposed, ms in ((None, 3.0), (chains(batch, 0.9), 8.0)):
            selected = budget.choose(batch, proposed)
            results = results_of(selected.trees, 16)
            budget.observe(batch, selected, results, StepTimes(draft=ms))
    forecast = budget.choose(batch, None).forecast
    assert forecast.predicted_ms - forecast.plain_ms == pytest.approx(3.0, rel=0.1)
    budget._gate = ShutGate()
    forecast = budget.choose(batch, None).forecast
    assert forecast.predicted_ms == forecast.plain_ms


def test_prompts_that_a_draft_reads_are_no_cost_of_drafting():
    """They are read while the gate is shut too."""
    budget, batch, mixed = make_budget(reads_while_open=True), batch_of(4), batch_of(3)
    mixed.entries.append(entry_of(9, run_len=50))
    for number in range(300):
        mixes = number % 3 == 2
        opened = budget.is_open
        step(budget, mixed if mixes else batch, 0.9, accepted=number % 2,
             times=StepTimes(draft=30.0 if mixes else 1.0))  # fmt: skip
        assert opened, number


def test_drafting_is_not_free_before_a_step_that_decodes_alone():
    budget, mixed = make_budget(), batch_of(3)
    mixed.entries.append(entry_of(9, run_len=50))
    for _ in range(30):
        step(budget, mixed, 0.9, accepted=1, times=StepTimes(draft=60.0))
    assert not budget.is_open


def tail_of(limits, replaced=0.0):
    """The requests that are numbered so have so many tokens left."""
    return Tail(replaced=replaced, remaining=lambda each: Remaining(1e9, limits[each.request_id]))


@pytest.mark.parametrize("replaced", [0.0, 1.0])
def test_where_nobody_waits_the_longest_request_is_drafted_for(replaced):
    budget, batch = make_budget(lambda rows: 10.0 + 1.0 * rows), batch_of(4)
    trees = chains(batch, 0.8, 4)
    as_of_a_queue = np.diff(budget.choose(batch, trees).trees.offsets_B1).tolist()
    assert as_of_a_queue[0] > 0
    batch = batch_of(4)
    batch.tail = tail_of([50, 50, 90, 50], replaced)
    chosen = np.diff(budget.choose(batch, trees).trees.offsets_B1).tolist()
    if replaced:
        assert chosen == as_of_a_queue
    else:
        assert chosen[2] > as_of_a_queue[2]
        assert chosen[:2] + chosen[3:] == [0, 0, 0], "their tokens only spare their own rows"


@pytest.mark.parametrize("waits", [False, True])
def test_tokens_of_requests_that_end_together_close_the_gate(waits):
    """One of them accepts a token in each step. Where none waits that spares no step."""
    width = 16
    budget = make_budget(
        lambda rows: 10.0 + np.minimum(rows, width) + 0.01 * np.maximum(rows - width, 0)
    )
    was_open = []
    for number in range(60):
        was_open.append(budget.is_open)
        batch = batch_of(width)
        batch.tail = None if waits else tail_of([60 - number] * width)
        selected = budget.choose(batch, chains(batch, 0.06, 1) if budget.is_open else None)
        results = results_of(selected.trees)
        if selected.trees.num_nodes:
            results[number % width] = EntryResult(token_ids=[0, 9], path=[1], num_drafted=1)
        budget.observe(batch, selected, results, StepTimes(draft=0.5))
    assert all(was_open) == waits


def test_whether_anybody_waits_is_asked_in_each_step():
    budget, batch = make_budget(), batch_of(4)
    waiting = budget.token_ms(batch)
    batch = batch_of(4)
    batch.tail = tail_of([50, 50, 90, 50])
    assert budget.token_ms(batch).argmax() == 2
    assert budget.token_ms(batch_of(4)).tolist() == waiting.tolist()


def test_only_requests_whose_tokens_could_pay_are_asked_about():
    budget, batch = make_budget(lambda rows: 10.0 + 1.0 * rows), batch_of(4)
    batch.tail = tail_of([50, 50, 90, 50])
    floors_B = budget.floors(batch)
    assert (floors_B <= 1.0).tolist() == [False, False, True, False]
    assert floors_B[2] < 0.2


def test_where_no_token_could_pay_nothing_is_asked_and_the_gate_closes():
    budget, batch = make_budget(proportional), batch_of(4)
    for _ in range(30):
        selected = step(budget, batch, 0.9)
        assert selected.proposed is None
    assert not budget.is_open


def test_a_token_that_saves_nothing_is_not_asked_for_even_for_nothing():
    """Rows are free, and other requests run on for long."""
    budget, batch = make_budget(lambda rows: 0 * rows + 9.0), batch_of(40)
    batch.tail = tail_of([1] + [4000] * 39)
    assert budget.token_ms(batch)[0] == 0.0
    floors_B = budget.floors(batch)
    assert floors_B[0] > 1.0
    assert floors_B[1:] == pytest.approx([0.02] * 39)
