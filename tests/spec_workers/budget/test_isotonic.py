"""The nearest sequence that never falls, against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from spec_workers.budget.cost_curve import isotonic


def test_it_is_what_scipy_says():
    rng = np.random.default_rng(1)
    for trial in range(150):
        size = int(rng.integers(1, 60))
        values = rng.normal(size=size) if trial % 2 else rng.integers(0, 4, size).astype(float)
        weights = 10.0 ** rng.uniform(-3, 3, size)
        nearest = isotonic(values.tolist(), weights.tolist())
        expected = isotonic_regression(values, weights=weights).x
        np.testing.assert_allclose(nearest, expected, rtol=1e-9, atol=1e-12)
        assert nearest == sorted(nearest)


def test_what_never_falls_stays():
    values = [-1.0, 0.0, 0.0, 2.0, 2.5]
    assert isotonic(values, [1.0, 9.0, 2.0, 0.1, 4.0]) == values
    assert isotonic([], []) == []


def test_each_value_has_a_weight():
    with pytest.raises(ValueError, match="shorter"):
        isotonic([1.0, 2.0], [1.0])
