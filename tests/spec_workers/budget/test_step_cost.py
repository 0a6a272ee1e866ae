"""The costs of steps, learned phase by phase."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rollout.types import StepTimes
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.step_cost import StepCost


def made():
    return StepCost(CostCurve(4, 256, 512))


def observe(cost, times, **step):
    usual = {"width": 8, "rows": 8, "proposed": False, "decode_only": True, "steps": 1}
    cost.observe(longest_context=200, times=times, **usual | step)


def show(cost, steps=300, *, speed=1.0, outliers=0.0, widths=(1, 16), seed=1):
    """Steps that take 10 + 0.2 rows, 0.5 + 0.05 rows, and 0.1 + 0.02 width or 0.4 + 0.05 width."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        width = int(rng.integers(widths[0], widths[1] + 1))
        rows, proposed = width + int(rng.integers(0, 4 * width)), step % 2 == 1
        slow = speed * (rng.uniform(5, 10) if rng.random() < outliers else 1.0)
        times = StepTimes(
            forward=slow * (10 + 0.2 * rows),
            sample=slow * (0.5 + 0.05 * rows),
            draft=slow * (0.4 + 0.05 * width if proposed else 0.1 + 0.02 * width),
        )
        observe(cost, times, width=width, rows=rows, proposed=proposed)
    return cost


def forward_ms(cost):
    rows = 8 + np.arange(33)
    return cost.forward_ms(rows, rows, 200)


def check_learned(cost, speed=1.0):
    rows, sampled = 48 + np.arange(33), 8 + np.arange(33)
    expected = speed * (10 + 0.2 * rows + 0.5 + 0.05 * sampled)
    np.testing.assert_allclose(cost.forward_ms(rows, sampled, 200), expected, rtol=0.1)
    for width in (2, 8, 16):
        assert cost.draft_ms(width) == pytest.approx(speed * (0.4 + 0.05 * width), rel=0.25)
        assert cost.idle_draft_ms(width) == pytest.approx(speed * (0.1 + 0.02 * width), rel=0.25)
    assert cost.read_ms(8) == 0


def test_all_phases_are_learned_in_spite_of_hiccups_and_changes_are_followed():
    cost = show(made(), 3000, outliers=0.03)
    check_learned(cost)
    show(cost, 3000, widths=(8, 8))  # a width that stays alike leaves the others known
    check_learned(cost)
    show(cost, 1000, speed=2.0)
    check_learned(cost, speed=2.0)


def test_no_time_is_negative_and_none_falls_with_the_count():
    curved, falling = made(), made()
    for width in np.random.default_rng(5).integers(1, 17, 500).tolist():
        observe(curved, StepTimes(draft=0.01 * width**2), width=width)
        times = StepTimes(draft=5.0 - 0.1 * width, sample=5.0 - 0.1 * width)
        observe(falling, times, width=width, rows=width)
    times = [curved.idle_draft_ms(width) for width in range(17)]
    assert min(times) >= 0
    assert times == sorted(times)
    assert falling.idle_draft_ms(1000) == 0
    more = falling.forward_ms(np.array([8, 8]), np.array([8, 90]), 200)
    assert more[0] == more[1]


def test_prefill_and_phases_of_unknown_time_teach_nothing():
    cost, known = show(made()), show(made())
    before = cost.learned()
    for proposed in (False, True):
        times = StepTimes(forward=1000.0, sample=100.0, draft=50.0)
        observe(cost, times, proposed=proposed, decode_only=False)
    assert cost.learned() == before
    times = StepTimes(forward=20.0, sample=1.0, draft=0.5)
    for proposed in (False, True):
        observe(cost, replace(times, draft=math.nan), proposed=proposed)
        observe(known, times, proposed=proposed)
    learned, also = cost.learned(), known.learned()
    assert learned["cost"] == also["cost"]
    for part, is_alike in (("sampling", True), ("drafting", False), ("following", False)):
        assert (learned["request_ms"][part] == also["request_ms"][part]) == is_alike
    observe(cost, replace(times, forward=math.nan), proposed=True)
    assert cost.learned()["cost"] == learned["cost"]
