"""A neural draft beside the corpus: asked while a step with it brings more tokens per millisecond
than a step with the corpus alone would have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.runner.model_runner import Forwarded
from rollout.types import EntryResult
from spec_workers.budget import FixedBudget
from spec_workers.draft_tree import only_roots
from spec_workers.hybrid import neural_gate
from spec_workers.hybrid.neural_gate import NeuralGate
from spec_workers.step.observation import Observation
from tests.helpers.budgets import make_budget
from tests.helpers.requests import decode_batch, make_request, make_trees

STEP_MS = 20.0
TEXT = list(range(100, 120))  # what the target says


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(neural_gate, "time", clock)
    return clock


def make_gate(*, per_row=0.0, is_known=True) -> NeuralGate:
    """Steps take 20 ms, and so much more for each row beyond the first."""

    def step_ms(rows):
        return STEP_MS + per_row * (rows - 1.0)

    return NeuralGate(make_budget(step_ms, ("any",), is_known=is_known), ("any",))


def chains(width, tokens, probability=0.9):
    """The same chain for each request, and how likely each of its nodes is."""
    trees = make_trees([(tokens, list(range(len(tokens))))] * width)
    trees.probs_N[:] = probability
    return trees


class World:
    """Every step is alike: the corpus has ``corpus`` right tokens, with the draft ``both`` are."""

    def __init__(self, *, corpus=0, both=0, wrong=0, believed=0.9, width=1, temperature=1.0):
        self.batch = decode_batch(
            [
                make_request(prompt_len=1, request_id=b, temperature=temperature)
                for b in range(width)
            ]
        )
        self.copied = chains(width, TEXT[:corpus], believed)
        self.verified = chains(width, TEXT[:both] + [7] * wrong)
        path = list(range(1, both + 1))
        self.results = [EntryResult(token_ids=TEXT[: both + 1], path=path) for _ in range(width)]

    def step(self) -> Observation:
        nothing = Forwarded(
            logits_RV=torch.zeros(0, 1),
            features_TF=torch.zeros(0, 0),
            offsets_B1=np.zeros(len(self.results) + 1, dtype=np.int32),
        )
        return Observation(batch=self.batch, trees=self.verified, was_asked=True,
                           forwarded=nothing, results=self.results)  # fmt: skip


def run(gate, clock, world, steps, *, spent_ms) -> list[bool]:
    """Whether it was open in each step. ``spent_ms``: what the draft takes, of the step's number
    if that matters."""
    found = []
    for number in range(steps):
        found.append(gate.is_open)
        if gate.is_open:
            with gate.timed():
                clock.now += (spent_ms(number) if callable(spent_ms) else spent_ms) / 1e3
        gate.judge(world.step(), world.copied, num_asked=len(world.results))
    return found


@pytest.mark.parametrize("width", [1, 4, 32])
def test_it_is_open_while_the_draft_brings_more_than_it_takes(clock, width):
    """Each request counts as much as one alone, where a step takes as long."""
    world = World(both=1, width=width)
    assert all(run(make_gate(), clock, world, 300, spent_ms=0.9 * STEP_MS))
    gate = make_gate()
    run(gate, clock, world, 100, spent_ms=1.1 * STEP_MS)
    assert not gate.is_open


def test_it_closes_where_it_takes_more_and_looks_again_now_and_then(clock):
    gate = make_gate()
    found = run(gate, clock, World(both=1), 400, spent_ms=1.1 * STEP_MS)
    assert all(found[:5])
    assert 0 < sum(found[100:]) < 60
    found = run(gate, clock, World(both=2), 600, spent_ms=0.3 * STEP_MS)
    assert all(found[-50:])


def test_what_the_corpus_finds_too_is_not_the_drafts_merit(clock):
    gate = make_gate()
    run(gate, clock, World(corpus=3, both=3), 100, spent_ms=0.1 * STEP_MS)
    assert not gate.is_open


def test_what_the_corpus_would_not_have_had_verified_is(clock):
    """It names the right token too, among many that are as improbable."""
    gate = make_gate(per_row=2.0)
    world = World(both=1)
    world.copied = make_trees([(TEXT[:1] + list(range(20)), [0] * 21)])
    world.copied.probs_N[:] = 0.03
    assert all(run(gate, clock, world, 300, spent_ms=0.5 * STEP_MS))


def test_verifying_what_the_draft_thinks_of_costs_too(clock):
    gate = make_gate(per_row=2.0)
    run(gate, clock, World(both=1, wrong=9), 100, spent_ms=0.2 * STEP_MS)
    assert not gate.is_open  # 4 ms of drafting and 20 of verifying for a step of 20
    assert all(run(make_gate(), clock, World(both=1, wrong=9), 100, spent_ms=0.2 * STEP_MS))


def test_a_good_corpus_makes_time_dear(clock):
    """Three tokens a step without the draft; it adds one and takes half a step."""
    gate = make_gate()
    run(gate, clock, World(corpus=2, both=3), 100, spent_ms=0.5 * STEP_MS)
    assert not gate.is_open
    assert all(run(make_gate(), clock, World(both=1), 100, spent_ms=0.5 * STEP_MS))


def test_a_few_slow_steps_of_a_busy_machine_do_not_close_it(clock):
    def spent_ms(number):
        return 30 * STEP_MS if number % 20 == 3 else 0.4 * STEP_MS

    assert all(run(make_gate(), clock, World(both=2), 400, spent_ms=spent_ms))


def test_where_nothing_is_known_of_costs_it_is_open(clock):
    for gate in (make_gate(is_known=False), NeuralGate(FixedBudget(0.0), ("any",))):
        assert all(run(gate, clock, World(both=1), 100, spent_ms=10 * STEP_MS))


def test_new_weights_are_looked_at_before_long(clock):
    gate = make_gate()
    run(gate, clock, World(both=1), 3000, spent_ms=2 * STEP_MS)
    gate.change_policy()
    assert any(run(gate, clock, World(both=1), 17, spent_ms=2 * STEP_MS))


def test_other_temperatures_are_looked_at_at_once(clock):
    """A draft that does not pay at temperature 1 often does where the target is surer."""
    gate = make_gate()
    run(gate, clock, World(both=0), 3000, spent_ms=0.4 * STEP_MS)
    found = run(gate, clock, World(both=3, temperature=0.0), 60, spent_ms=0.4 * STEP_MS)
    assert all(found[1:])


def test_steps_without_samples_say_nothing(clock):
    gate = make_gate()
    before = gate.learned()
    world = World(width=0)
    with gate.timed():
        clock.now += 9.0
    gate.judge(world.step(), only_roots(0), num_asked=0)
    assert gate.learned() == before


@pytest.mark.parametrize(("draft", "least"), [(0.0, 0.97), (0.1, 0.97), (0.5, 0.96), (1.5, 0.98)])
def test_it_is_as_fast_as_the_better_of_with_and_without(clock, draft, least):
    """The draft adds so many tokens a step on average and takes 0.4 steps. Tokens per millisecond
    are compared with the better of always and never drafting, where accepted tokens vary."""
    rng = np.random.default_rng(5)
    gate, steps = make_gate(), 6000
    worlds = {pair: World(corpus=pair[0], both=sum(pair)) for pair in np.ndindex(4, 8)}
    tokens, spent = np.zeros(3), np.zeros(3)  # by the gate, with it always, never
    for _ in range(steps):
        pair = (int(rng.integers(0, 3)), int(min(rng.geometric(1 / (1 + draft)) - 1, 7)))
        by_arm = {True: (1 + sum(pair), 1.4 * STEP_MS), False: (1 + pair[0], STEP_MS)}
        for row, is_drafting in enumerate((gate.is_open, True, False)):
            tokens[row] += by_arm[is_drafting][0]
            spent[row] += by_arm[is_drafting][1]
        run(gate, clock, worlds[pair], 1, spent_ms=0.4 * STEP_MS)
    ours, always, never = tokens / spent
    assert ours >= least * max(always, never), (ours, always, never)


def test_the_corpus_is_believed_as_far_as_it_was_right(clock):
    """The corpus alone is judged by its own record: it is right although it believes little, and
    more of its nodes would be verified then."""
    gate = make_gate(per_row=4.0)
    run(gate, clock, World(corpus=2, both=2, believed=0.15), 400, spent_ms=0.3 * STEP_MS)
    assert not gate.is_open


def test_of_many_open_steps_a_part_is_judged(clock, monkeypatch):
    """All that follow its opening are, so also those in which it looks."""
    gate, judged = make_gate(), []
    observe = gate._gate.observe
    monkeypatch.setattr(gate._gate, "observe", lambda *told: judged.append(observe(*told)))
    run(gate, clock, World(both=1), 48, spent_ms=0.1 * STEP_MS)
    assert len(judged) == 48
    run(gate, clock, World(both=1), 500, spent_ms=0.1 * STEP_MS)
    assert len(judged) == 48 + 166
    assert not all(run(gate, clock, World(both=0), 300, spent_ms=0.9 * STEP_MS))
    while gate.is_open:
        run(gate, clock, World(both=0), 1, spent_ms=0.9 * STEP_MS)
    before = len(judged)
    looked = sum(run(gate, clock, World(both=0), 400, spent_ms=0.9 * STEP_MS))
    assert 0 < looked == len(judged) - before
