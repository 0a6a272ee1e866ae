"""Times learned as weighted sums of counts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spec_workers.budget.linear_cost import LinearCost

NAMES = ("step", "requests", "rows")
TRUE = np.array([1.0, 0.1, 0.02])


def show(cost, rng, steps, counts, *, scale=1.0, outliers=0.0):
    for _ in range(steps):
        x = counts(rng)
        milliseconds = scale * float(TRUE @ np.array(x)) * rng.lognormal(0, 0.05)
        if rng.random() < outliers:
            milliseconds *= rng.uniform(5, 10)
        cost.observe(x, milliseconds)


def varied(rng):
    width = int(rng.integers(1, 17))
    return 1, width, width + int(rng.integers(0, 63 * width))


def one_width(rng):
    return 1, 16, int(rng.integers(16, 80))


def never_drafting(rng):
    return 1, 16, 16


def one_request(rng):
    return 1, 1, 64 if rng.random() < 1e-3 else 1


def check_sound(cost):
    assert np.isfinite(cost._inverse).all()
    np.testing.assert_array_equal(cost._inverse, cost._inverse.T)
    assert np.linalg.eigvalsh(cost._inverse).min() > 0
    assert min(cost.slope(name) for name in NAMES) >= 0
    assert cost.milliseconds((1, 0, 0)) >= 0


def test_weights_are_recovered_in_spite_of_hiccups():
    cost = LinearCost(NAMES)
    show(cost, np.random.default_rng(1), 2000, varied, outliers=0.05)
    assert [cost.slope(name) for name in NAMES] == pytest.approx(TRUE, rel=0.5, abs=0.3)
    for counts in ((1, 1, 1), (1, 8, 50), (1, 16, 400)):
        assert cost.milliseconds(counts) == pytest.approx(TRUE @ np.array(counts), rel=0.35)


@pytest.mark.parametrize("counts", [varied, one_width, never_drafting, one_request])
def test_it_stays_sound_over_a_long_run(counts):
    cost, rng = LinearCost(NAMES), np.random.default_rng(2)
    show(cost, rng, 50_000, counts, outliers=0.02)
    check_sound(cost)
    x = counts(rng)
    assert cost.milliseconds(x) == pytest.approx(TRUE @ np.array(x), rel=0.2)


def test_counts_that_come_back_after_a_long_time():
    cost, rng = LinearCost(NAMES), np.random.default_rng(3)
    for counts in (varied, never_drafting, one_width, one_request, varied) * 2:
        show(cost, rng, 2000, counts)
        check_sound(cost)
        x = counts(rng)
        assert cost.milliseconds(x) == pytest.approx(TRUE @ np.array(x), rel=0.25)


@pytest.mark.parametrize("counts", [varied, one_width, never_drafting])
def test_a_change_is_followed_whatever_has_not_varied(counts):
    cost, rng = LinearCost(NAMES), np.random.default_rng(4)
    show(cost, rng, 5000, counts)
    show(cost, rng, 500, counts, scale=2.0)
    x = counts(rng)
    assert cost.milliseconds(x) == pytest.approx(2 * TRUE @ np.array(x), rel=0.15)


def test_none_of_the_counts_makes_it_less():
    cost, rng = LinearCost(("step", "requests")), np.random.default_rng(5)
    for _ in range(500):
        width = int(rng.integers(1, 17))
        cost.observe((1, width), 0.01 * width**2)
    times = [cost.milliseconds((1, width)) for width in range(17)]
    assert min(times) >= 0
    assert times == sorted(times)


def test_restored_it_is_the_same():
    cost, other = LinearCost(NAMES), LinearCost(NAMES)
    show(cost, np.random.default_rng(6), 50, varied)
    other.restore(json.loads(json.dumps(cost.learned())))
    assert other.learned() == cost.learned()
    assert other.milliseconds((1, 9, 30)) == pytest.approx(cost.milliseconds((1, 9, 30)), rel=1e-3)


@pytest.mark.parametrize(
    "learned",
    [
        {},
        {"step": 1.0, "requests": 1.0},
        {"step": 1.0, "requests": 1.0, "rows": 1.0, "more": 1.0},
        {"step": 1.0, "requests": 1.0, "rows": float("nan")},
        {"step": 1.0, "requests": 1.0, "rows": "many"},
        {"step": 1.0, "requests": 1.0, "rows": None},
        {"step": 1.0, "requests": 1.0, "rows": [1.0]},
    ],
)
def test_what_is_damaged_is_refused(learned):
    cost = LinearCost(NAMES)
    show(cost, np.random.default_rng(7), 5, varied)
    before = cost.learned()
    with pytest.raises(ValueError, match=r"rows|must give a number"):
        cost.restore(learned)
    assert cost.learned() == before
