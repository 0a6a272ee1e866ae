"""The costs of steps, kept per device."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from rollout.types import StepTimes
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.step_cost import StepCost


def made(device="here", max_context_len=512):
    return StepCost(device, CostCurve(4, 256, max_context_len))


def show(cost, steps=300, *, speed=1.0, seed=1):
    rng = np.random.default_rng(seed)
    for step in range(steps):
        width = int(rng.integers(1, 17))
        nodes = int(rng.integers(0, 4 * width))
        rows, proposed = width + nodes, step % 2 == 1
        draft = 0.1 + 0.02 * width + (0.3 + 0.03 * width if proposed else 0.0)
        cost.observe(
            width=width,
            rows=rows,
            longest_context=200,
            proposed=proposed,
            times=StepTimes(
                forward=speed * (10 + 0.2 * rows), sample=0.5 + 0.05 * rows, draft=draft,
            ),
            decode_only=True,
            steps=1,
        )  # fmt: skip


def restored(learned, device="here"):
    cost = made(device)
    cost.restore(json.loads(json.dumps(learned)))
    return cost


def of_rows(cost, width=8):
    rows = width + np.arange(33)
    return cost.of_rows(rows, rows, 200)


def test_all_parts_are_learned():
    cost = made()
    show(cost, 1500)
    rows = 8 + np.arange(33)
    np.testing.assert_allclose(of_rows(cost), 10.5 + 0.25 * rows, rtol=0.1)
    assert cost.of_drafting(8) == pytest.approx(0.8, rel=0.2)
    assert cost.of_following(8) == pytest.approx(0.26, rel=0.2)


def test_rows_that_are_not_sampled_from_take_the_forward_alone():
    cost = made()
    show(cost, 1500)
    rows, sampled = 48 + np.arange(33), 8 + np.arange(33)
    expected = 10 + 0.2 * rows + 0.5 + 0.05 * sampled
    np.testing.assert_allclose(cost.of_rows(rows, sampled, 200), expected, rtol=0.1)


def test_steps_with_prefill_tell_nothing():
    """A neural draft reads every row of a prompt: following what is decoded is not as dear."""
    cost = made()
    show(cost)
    learned = cost.learned()
    times = StepTimes(forward=1000.0, sample=100.0, draft=50.0)
    for proposed in (False, True):
        cost.observe(width=2, rows=90, longest_context=90, proposed=proposed, times=times,
                     decode_only=False, steps=1)  # fmt: skip
    assert cost.learned() == learned


def test_of_a_phase_that_took_what_it_will_not_again_nothing_is_learned():
    """Kernels were compiled, a graph was captured."""
    cost, known = made(), made()
    show(cost)
    show(known)
    times = StepTimes(forward=20.0, sample=1.0, draft=0.5)
    for proposed in (False, True):
        for each, draft in ((cost, math.nan), (known, 0.5)):
            each.observe(width=2, rows=9, longest_context=90, proposed=proposed, steps=1,
                         times=replace(times, draft=draft), decode_only=True)  # fmt: skip
    learned, also = cost.learned(), known.learned()
    json.dumps(learned, allow_nan=False)
    assert learned["cost"] == also["cost"]
    for part, is_alike in (("sampling", True), ("drafting", False), ("following", False)):
        assert (learned["request_ms"][part] == also["request_ms"][part]) == is_alike
    before = cost.learned()["cost"]
    cost.observe(width=2, rows=9, longest_context=90, proposed=True, steps=1,
                 times=replace(times, forward=math.nan), decode_only=True)  # fmt: skip
    assert cost.learned()["cost"] == before


def test_a_machine_that_changed_between_steps_looked_at_is_followed_sooner():
    """An observation that stands for many steps counts for more than one that stands for itself."""
    times = StepTimes(forward=20.0, sample=1.0, draft=0.1)

    def after(steps):
        cost = made()
        show(cost)
        for _ in range(3):
            cost.observe(width=8, rows=8, longest_context=200, proposed=True, times=times,
                         decode_only=True, steps=steps)  # fmt: skip
        return cost.curve.milliseconds(np.array([8]), 200)[0]

    assert after(32) > after(1)


def test_restored_it_is_the_same():
    cost = made()
    show(cost)
    again = restored(cost.learned())
    np.testing.assert_allclose(of_rows(again), of_rows(cost), rtol=1e-4)
    assert again.of_drafting(8) == pytest.approx(cost.of_drafting(8), rel=1e-3)
    assert again.of_following(8) == pytest.approx(cost.of_following(8), rel=1e-3)
    assert again.learned()["request_ms"] == cost.learned()["request_ms"]


def test_where_reading_is_not_told_apart_following_is_learned_anew():
    cost = made()
    show(cost)
    for _ in range(20):
        cost.observe(width=4, rows=4, longest_context=200, proposed=False, reads=True, steps=1,
                     times=StepTimes(forward=10.0, draft=3.0), decode_only=True)  # fmt: skip
    learned = cost.learned()
    again = restored(learned)
    assert again.of_reading(4) == pytest.approx(3.0, rel=0.1)
    assert again.of_following(4) == pytest.approx(cost.of_following(4), rel=1e-3)
    del learned["request_ms"]["reading"]
    again = restored(learned)
    assert again.of_following(4) == again.of_reading(4) == 0
    assert again.of_drafting(4) == pytest.approx(cost.of_drafting(4), rel=1e-3)


def test_devices_are_kept_apart():
    here, there = made("here"), made("there")
    show(here)
    there.restore(here.learned())
    assert not there.is_known
    show(there, speed=3.0, seed=2)
    back = restored(there.learned(), "here")
    np.testing.assert_allclose(of_rows(back), of_rows(here), rtol=1e-4)
    assert list(back.learned()["elsewhere"]) == ["there"]
    again = restored(back.learned(), "there")
    np.testing.assert_allclose(of_rows(again), of_rows(there), rtol=1e-4)


def test_nothing_to_restore_forgets_nothing():
    here, there = made("here"), made("there")
    show(there)
    here.restore(there.learned())
    here.restore({})
    np.testing.assert_allclose(
        of_rows(restored(here.learned(), "there")), of_rows(there), rtol=1e-4
    )


BROKEN_PARTS = [
    {},
    {"step": 1.0},
    {"step": 1.0, "each": 1.0, "more": 1.0},
    {"step": 1.0, "each": float("nan")},
    {"step": 1.0, "each": "many"},
    {"step": 1.0, "each": None},
    {"step": 1.0, "each": [1.0]},
]


@pytest.mark.parametrize(
    "damage",
    [
        {"cost": None},
        {"cost": [1, 2]},
        {"cost": {}},
        {"request_ms": 3},
        {"request_ms": {}},
        *(
            {"request_ms": dict.fromkeys(("sampling", "drafting", "following"), part)}
            for part in BROKEN_PARTS
        ),
        {"elsewhere": [1]},
        {"elsewhere": None},
        {"device": "there", "elsewhere": {"here": 5}},
        {"device": "there", "elsewhere": {"here": {}}},
    ],
)
def test_what_is_damaged_is_refused(damage):
    cost = made()
    show(cost, 20)
    with pytest.raises(ValueError, match=r"cost|request_ms|sampling|rows|each|elsewhere|here"):
        made().restore(deepcopy(cost.learned()) | damage)
