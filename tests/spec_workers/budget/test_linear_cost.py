"""Times learned as so much a step and so much for each."""

from __future__ import annotations

import numpy as np
import pytest

from spec_workers.budget.step_cost import LinearCost

STEP, EACH = 1.0, 0.02


def true(count):
    return STEP + EACH * count


def show(cost, rng, steps, counts, *, scale=1.0, outliers=0.0):
    for _ in range(steps):
        count = counts(rng)
        milliseconds = scale * true(count) * rng.lognormal(0, 0.05)
        if rng.random() < outliers:
            milliseconds *= rng.uniform(5, 10)
        cost.observe(count, milliseconds)


def varied(rng):
    width = int(rng.integers(1, 17))
    return width + int(rng.integers(0, 63 * width))


def a_few(rng):
    return int(rng.integers(16, 80))


def one_count(rng):
    return 16


def nearly_one_count(rng):
    return 64 if rng.random() < 1e-3 else 1


def check_sound(cost):
    assert np.isfinite(cost._inverse).all()
    np.testing.assert_array_equal(cost._inverse, cost._inverse.T)
    assert np.linalg.eigvalsh(cost._inverse).min() > 0
    assert cost.each >= 0
    assert cost.milliseconds(0) >= 0


def test_weights_are_recovered_in_spite_of_hiccups():
    cost = LinearCost()
    show(cost, np.random.default_rng(1), 2000, varied, outliers=0.05)
    assert cost.each == pytest.approx(EACH, rel=0.2)
    for count in (1, 50, 400):
        assert cost.milliseconds(count) == pytest.approx(true(count), rel=0.35)


@pytest.mark.parametrize("counts", [varied, a_few, one_count, nearly_one_count])
def test_it_stays_sound_over_a_long_run(counts):
    cost, rng = LinearCost(), np.random.default_rng(2)
    show(cost, rng, 20_000, counts, outliers=0.02)
    check_sound(cost)
    count = counts(rng)
    assert cost.milliseconds(count) == pytest.approx(true(count), rel=0.2)


def test_counts_that_come_back_after_a_long_time():
    cost, rng = LinearCost(), np.random.default_rng(3)
    for counts in (varied, one_count, a_few, nearly_one_count, varied) * 2:
        show(cost, rng, 2000, counts)
        check_sound(cost)
        count = counts(rng)
        assert cost.milliseconds(count) == pytest.approx(true(count), rel=0.25)


def test_what_one_count_tells_leaves_the_rest_known():
    """The times of other counts are not forgotten while only one count is seen."""
    cost, rng = LinearCost(), np.random.default_rng(4)
    show(cost, rng, 2000, a_few)
    show(cost, rng, 20_000, one_count)
    assert cost.each == pytest.approx(EACH, rel=0.35)


@pytest.mark.parametrize("counts", [varied, a_few, one_count])
def test_a_change_is_followed_whatever_has_not_varied(counts):
    cost, rng = LinearCost(), np.random.default_rng(4)
    show(cost, rng, 5000, counts)
    show(cost, rng, 500, counts, scale=2.0)
    count = counts(rng)
    assert cost.milliseconds(count) == pytest.approx(2 * true(count), rel=0.15)


def test_no_count_takes_less_time_than_a_smaller_one():
    cost, rng = LinearCost(), np.random.default_rng(5)
    for _ in range(500):
        count = int(rng.integers(1, 17))
        cost.observe(count, 0.01 * count**2)  # a step by itself would take less than nothing
    times = [cost.milliseconds(count) for count in range(17)]
    assert min(times) >= 0
    assert times == sorted(times)


def test_what_falls_with_the_count_is_not_dearer_for_less():
    cost, rng = LinearCost(), np.random.default_rng(6)
    for _ in range(500):
        count = int(rng.integers(1, 17))
        cost.observe(count, 5.0 - 0.1 * count)
    assert cost.each == 0
    assert cost.milliseconds(1000) >= 0
