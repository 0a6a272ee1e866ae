"""A neural draft beside the corpus: asked while its own nodes spare more than running it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.runner import Forwarded
from rollout.types import EntryResult
from spec_workers.budget import FixedBudget, LearnedBudget
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.node_values import NodeValues
from spec_workers.budget.step_cost import StepCost
from spec_workers.neural import neural_gate
from spec_workers.neural.neural_gate import NeuralGate
from spec_workers.observation import Observation
from tests.helpers.requests import decode_batch, make_request, make_trees

CORPUS, NEURAL, BOTH = range(3)
STEP_MS = 20.0


class EvenCurve(CostCurve):
    """Steps take as long however many rows they have."""

    def __init__(self, *, is_known: bool) -> None:
        super().__init__(1, 4096, 512)
        self.told = is_known

    @property
    def is_known(self) -> bool:
        return self.told

    def milliseconds(self, rows, longest_context):
        return np.full(len(rows), STEP_MS)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(neural_gate, "time", clock)
    return clock


def make_gate(*, is_known: bool = True) -> NeuralGate:
    cost = StepCost("here", EvenCurve(is_known=is_known))
    budget = LearnedBudget(cost, NodeValues(("corpus", "neural", "both")), 0.02)
    return NeuralGate(budget, NEURAL, BOTH)


def step_of(width: int, accepted: int, source: int) -> Observation:
    """A step in which so many nodes were accepted for the first request, all of one source."""
    batch = decode_batch([make_request(request_id=b) for b in range(width)])
    trees = make_trees([([5] * 3, [0, 1, 2])] * width)
    trees.sources_N[:] = source
    path = list(range(1, accepted + 1))
    results = [EntryResult(token_ids=[5] * (accepted + 1), path=path)]
    results += [EntryResult(token_ids=[5]) for _ in range(width - 1)]
    nothing = Forwarded(
        logits_RV=torch.zeros(0, 1),
        features_TF=torch.zeros(0, 0),
        offsets_B1=np.zeros(width + 1, dtype=np.int32),
    )
    return Observation(batch=batch, trees=trees, was_asked=True, forwarded=nothing, results=results)


def run(gate, clock, steps, *, spent_ms, accepted=1, source=NEURAL, width=1) -> list[bool]:
    """Whether it was open in each step."""
    found = []
    for _ in range(steps):
        found.append(gate.is_open)
        if gate.is_open:
            with gate.timed():
                clock.now += spent_ms / 1e3
        gate.judge(step_of(width, accepted, source))
    return found


def test_it_stays_open_while_its_nodes_spare_more_than_it_takes(clock):
    gate = make_gate()
    assert all(run(gate, clock, 200, spent_ms=0.9 * STEP_MS))


def test_it_closes_where_it_takes_more_and_looks_again_now_and_then(clock):
    gate = make_gate()
    found = run(gate, clock, 400, spent_ms=1.1 * STEP_MS)
    assert all(found[:20])
    assert 0 < sum(found[100:]) < 60
    assert not all(run(gate, clock, 30, spent_ms=1.1 * STEP_MS))
    # A batch of half the width spares twice as much per token, and is looked at at once.
    found = run(gate, clock, 600, spent_ms=0.1 * STEP_MS, accepted=2)
    assert all(found[-50:])


@pytest.mark.parametrize("source", [CORPUS, BOTH])
def test_what_the_corpus_proposes_too_is_not_the_drafts_merit(clock, source):
    gate = make_gate()
    run(gate, clock, 100, spent_ms=0.1 * STEP_MS, accepted=3, source=source)
    assert not gate.is_open


def test_a_token_of_many_requests_spares_less(clock):
    gate = make_gate()
    run(gate, clock, 100, spent_ms=0.5 * STEP_MS, width=4)
    assert not gate.is_open


def test_where_nothing_is_known_of_costs_it_is_open(clock):
    for gate in (make_gate(is_known=False), NeuralGate(FixedBudget(0.0), NEURAL, BOTH)):
        assert all(run(gate, clock, 100, spent_ms=10 * STEP_MS))


def test_new_weights_are_looked_at_before_long(clock):
    gate = make_gate()
    run(gate, clock, 3000, spent_ms=2 * STEP_MS)
    gate.change_policy()
    assert any(run(gate, clock, 17, spent_ms=2 * STEP_MS))
