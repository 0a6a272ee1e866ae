"""A neural draft beside the corpus: asked while it brings more tokens per millisecond than the
corpus alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.runner.model_runner import Forwarded
from rollout.types import EntryResult, FinishReason
from spec_workers.budget import FixedBudget
from spec_workers.hybrid import neural_gate
from spec_workers.hybrid.neural_gate import NeuralGate, accepted_in_hindsight, agreement
from spec_workers.step.observation import Observation
from tests.helpers.budgets import make_budget
from tests.helpers.requests import decode_batch, make_request, make_trees

STEP_MS = 20.0
TEXT = list(range(100, 120))  # the target's tokens


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
    """The same chain for each request."""
    trees = make_trees([(tokens, list(range(len(tokens))))] * width)
    trees.probs_N[:] = probability
    return trees


class World:
    """Steps in which ``corpus`` tokens of the corpus are right, and ``both`` with the draft."""

    def __init__(self, *, corpus=0, both=0, wrong=0, believed=0.9, width=1):
        self.batch = decode_batch([make_request(prompt_len=1, request_id=b) for b in range(width)])
        self.copied = chains(width, TEXT[:corpus], believed)
        self.verified = chains(width, TEXT[:both] + [7] * wrong)
        path = list(range(1, both + 1))
        self.results = [EntryResult(token_ids=TEXT[: both + 1], path=path) for _ in range(width)]

    def step(self) -> Observation:
        nothing = Forwarded(
            features_TF=torch.zeros(0, 0),
            offsets_B1=np.zeros(len(self.results) + 1, dtype=np.int32),
        )
        return Observation(batch=self.batch, trees=self.verified, was_asked=True,
                           forwarded=nothing, results=self.results)  # fmt: skip


def run(gate, clock, world, steps, *, spent_ms) -> list[bool]:
    """Whether it was open in each step. ``spent_ms``: the draft's time, or a function of the
    step's number."""
    found = []
    for number in range(steps):
        gate.begin_step(world.batch)
        found.append(gate.is_open)
        if gate.is_open:
            with gate.timed():
                clock.now += (spent_ms(number) if callable(spent_ms) else spent_ms) / 1e3
        gate.judge(world.step(), world.copied, num_asked=len(world.results))
    return found


def stays_open(clock, world, *, spent_ms, per_row=0.0) -> bool:
    found = run(make_gate(per_row=per_row), clock, world, 400, spent_ms=spent_ms * STEP_MS)
    assert all(found) or sum(found) < 200
    return all(found)


@pytest.mark.parametrize("width", [1, 4, 32])
def test_it_is_open_while_the_draft_brings_more_than_it_takes(clock, width):
    """Each request counts as much as one alone where a step takes as long."""
    world = World(both=1, width=width)
    assert stays_open(clock, world, spent_ms=0.9)
    assert not stays_open(clock, world, spent_ms=1.1)


def test_it_closes_when_the_draft_stops_paying_probes_and_opens_again(clock):
    gate = make_gate()
    assert all(run(gate, clock, World(both=1), 548, spent_ms=0.1 * STEP_MS))
    found = run(gate, clock, World(both=1), 700, spent_ms=1.5 * STEP_MS)
    assert 0 < sum(found[300:]) < 60
    found = run(gate, clock, World(both=2), 600, spent_ms=0.3 * STEP_MS)
    assert all(found[-50:])


def test_only_tokens_that_the_corpus_alone_would_not_have_had_count(clock):
    assert not stays_open(clock, World(corpus=3, both=3), spent_ms=0.1)
    # The corpus names the right token too, among many that are as improbable.
    world = World(both=1)
    world.copied = make_trees([(TEXT[:1] + list(range(20)), [0] * 21)])
    world.copied.probs_N[:] = 0.03
    assert stays_open(clock, world, spent_ms=0.5, per_row=2.0)
    # The corpus is right although it believes little: more of its nodes would be verified.
    assert not stays_open(clock, World(corpus=2, both=2, believed=0.15), spent_ms=0.3, per_row=4.0)


def test_verifying_the_drafts_nodes_costs_too(clock):
    """A step of 20 ms with 4 ms of drafting and 20 of verifying."""
    world = World(both=1, wrong=9)
    assert not stays_open(clock, world, spent_ms=0.2, per_row=2.0)
    assert stays_open(clock, world, spent_ms=0.2)


def test_a_good_corpus_makes_time_expensive(clock):
    """Three tokens a step without the draft; it adds one and takes half a step."""
    assert not stays_open(clock, World(corpus=2, both=3), spent_ms=0.5)
    assert stays_open(clock, World(both=1), spent_ms=0.5)


def test_while_costs_are_unknown_it_is_open(clock):
    for gate in (make_gate(is_known=False), NeuralGate(FixedBudget(0.0), ("any",))):
        assert all(run(gate, clock, World(both=1), 100, spent_ms=10 * STEP_MS))


@pytest.mark.parametrize(("draft", "least"), [(0.1, 0.97), (0.5, 0.96), (1.5, 0.98)])
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


@pytest.mark.parametrize("is_ended", [False, True])
def test_trees_are_judged_by_what_was_emitted(is_ended):
    """By the tokens emitted, then by the values of nodes below the last of them."""
    trees = make_trees([([], []), ([5, 6, 7, 4, 8], [0, 0, 1, 1, 3])])
    values = np.array([0.5, 0.4, 0.3, 0.4, 0.2])
    for emitted, accepted, right, known in (
        ([9], 0, [], [0, 1, 2, 3, 4]),
        ([5, 9], 1, [0], [0, 1, 2, 3, 4]),
        ([5, 7, 9], 2, [0, 2], [0, 1, 2, 3, 4]),
        ([5], 1 + (0.4 + 0.3 + 0.2) / 0.5, [0], [0, 1]),  # the rest is beyond it
        ([5, 7], 2 + 0.2 / 0.3, [0, 2], [0, 1, 2, 3]),
        ([5, 7, 8], 3, [0, 2, 4], [0, 1, 2, 3, 4]),
        ([], 0, [], []),
    ):
        result = EntryResult(token_ids=emitted)
        if is_ended:
            result.finish_reason = FinishReason.STOP
            accepted, known = min(len(right), max(0, len(emitted) - 1)), []
        results = [EntryResult(token_ids=[5]), result]
        found = agreement(trees, results)
        assert np.flatnonzero(found.right_N).tolist() == right, emitted
        assert np.flatnonzero(found.known_N).tolist() == known, emitted
        judged = accepted_in_hindsight(trees, values, results, found)
        assert judged.tolist() == pytest.approx([0.0, accepted]), emitted
