"""The nearest sequence that never falls, against slow ways to find it."""

from __future__ import annotations

import numpy as np
import pytest

from spec_workers.budget.cost_curve import isotonic


def by_min_max(values, weights):
    """The min-max formula: of all means of stretches that end at or after i, the least; of those
    least ones of stretches that begin at or before i, the greatest."""
    size = len(values)
    mean = {
        (i, j): np.average(values[i : j + 1], weights=weights[i : j + 1])
        for i in range(size)
        for j in range(i, size)
    }
    return [max(min(mean[i, j] for j in range(k, size)) for i in range(k + 1)) for k in range(size)]


def sequences(count, seed, most=12):
    rng = np.random.default_rng(seed)
    for trial in range(count):
        size = int(rng.integers(1, most + 1))
        values = rng.normal(size=size) if trial % 2 else rng.integers(0, 4, size).astype(float)
        yield values.tolist(), (10.0 ** rng.uniform(-3, 3, size)).tolist()


def test_it_is_the_nearest():
    for values, weights in sequences(200, 1):
        np.testing.assert_allclose(
            isotonic(values, weights), by_min_max(values, weights), rtol=1e-9, atol=1e-12
        )


def test_it_is_what_scipy_says():
    optimize = pytest.importorskip("scipy.optimize")
    for values, weights in sequences(50, 2, most=60):
        expected = optimize.isotonic_regression(values, weights=weights).x
        np.testing.assert_allclose(isotonic(values, weights), expected, rtol=1e-9, atol=1e-12)


def test_it_never_falls_and_keeps_the_mean():
    for values, weights in sequences(100, 3, most=80):
        nearest = isotonic(values, weights)
        assert len(nearest) == len(values)
        assert nearest == sorted(nearest)
        assert np.average(nearest, weights=weights) == pytest.approx(
            np.average(values, weights=weights)
        )


def test_what_never_falls_stays():
    values = [-1.0, 0.0, 0.0, 2.0, 2.5]
    assert isotonic(values, [1.0, 9.0, 2.0, 0.1, 4.0]) == values
    assert isotonic([], []) == []


def test_the_heavier_one_moves_less():
    assert isotonic([3.0, 0.0], [2.0, 1.0]) == [2.0, 2.0]


def test_each_value_has_a_weight():
    with pytest.raises(ValueError, match="shorter"):
        isotonic([1.0, 2.0], [1.0])
