"""The learned times of forwards, against made-up machines."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from spec_workers.budget.cost_curve import CostCurve, isotonic


def ramp(rows):
    """Memory-bound, then compute-bound."""
    return np.maximum(14.0, 8.0 + 0.8 * np.asarray(rows))


def stairs(rows):
    """A graph per power of two."""
    return 10.0 + 3.0 * np.ceil(np.log2(np.maximum(rows, 4) / 4))


def show(curve, machine, rng, *, steps, max_rows, context=300, outliers=0.0):
    for _ in range(steps):
        rows = int(rng.integers(1, max_rows + 1))
        milliseconds = float(machine(rows)) * rng.lognormal(0, 0.03)
        if rng.random() < outliers:
            milliseconds *= rng.uniform(5, 10)
        curve.observe(rows, context, milliseconds)


def errors(curve, machine, rows, context=300):
    rows = np.asarray(rows)
    return np.abs(curve.milliseconds(rows, context) / machine(rows) - 1)


def times_at(curve, *rows, context=300):
    return curve.milliseconds(np.array(rows), context)


def check_monotone(curve):
    rows = np.arange(1, 3000, 3)
    times = np.array([curve.milliseconds(rows, context) for context in (1, 257, 600, 5000)])
    assert np.isfinite(times).all()
    assert (times > 0).all()
    assert (np.diff(times, axis=1) >= -1e-9 * times[:, 1:]).all()
    assert (np.diff(times, axis=0) >= -1e-9 * times[1:]).all()


def made():
    return CostCurve(4, 1024, 2048)


@pytest.mark.parametrize(("machine", "mean", "most"), [(ramp, 0.03, 0.08), (stairs, 0.08, 0.25)])
def test_a_machine_is_learned_in_spite_of_hiccups(machine, mean, most):
    curve = made()
    assert not curve.is_known
    show(curve, machine, np.random.default_rng(1), steps=600, max_rows=64, outliers=0.05)
    error = errors(curve, machine, range(1, 65))
    assert error.mean() < mean
    assert error.max() < most
    assert curve.is_known
    check_monotone(curve)
    before = times_at(curve, *range(1, 65))
    curve.observe(16, 300, 1e6)
    curve.observe(16, 300, 1e-3)
    np.testing.assert_allclose(times_at(curve, *range(1, 65)), before, rtol=0.15)


def test_unseen_sizes_and_contexts_are_interpolated():
    curve, rng = made(), np.random.default_rng(2)
    for _ in range(200):
        rows = int(rng.choice([4, 16, 128]))
        curve.observe(rows, 300, float(ramp(rows)) * rng.lognormal(0, 0.03))
    assert errors(curve, ramp, [4, 16, 128]).max() < 0.05
    assert errors(curve, ramp, range(4, 129)).max() < 0.35
    longer = times_at(curve, 16, 128, context=1000) / ramp([16, 128])
    assert (longer > 1.05).all()
    assert (longer < 1.2).all()


def test_a_machine_that_slows_down_is_followed_everywhere():
    curve, rng = made(), np.random.default_rng(3)
    show(curve, ramp, rng, steps=400, max_rows=64)
    show(curve, lambda rows: 1.5 * ramp(rows), rng, steps=40, max_rows=8)
    slower = times_at(curve, 4, 8, 32, 64) / ramp([4, 8, 32, 64])
    assert (slower > 1.35).all()
    assert (slower < 1.6).all()
    assert times_at(curve, 8, context=2000)[0] > 1.35 * ramp(8)


def test_times_that_are_not_positive_are_ignored():
    curve = made()
    before = curve.learned()
    for milliseconds in (0.0, -1.0, float("nan")):
        curve.observe(8, 100, milliseconds)
    assert curve.learned() == before
    assert not curve.is_known


def test_isotonic_regression_is_scipys():
    rng = np.random.default_rng(1)
    for trial in range(150):
        size = int(rng.integers(1, 60))
        values = rng.normal(size=size) if trial % 2 else rng.integers(0, 4, size).astype(float)
        weights = 10.0 ** rng.uniform(-3, 3, size)
        expected = isotonic_regression(values, weights=weights).x
        found = isotonic(values.tolist(), weights.tolist())
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
