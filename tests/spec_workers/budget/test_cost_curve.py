"""The learned times of forwards and of drafting, against made-up machines."""

from __future__ import annotations

import numpy as np
import pytest

from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.running_mean import MeanByOctave


def ramp(rows):
    """Memory-bound, then compute-bound."""
    return np.maximum(14.0, 8.0 + 0.8 * np.asarray(rows))


def stairs(rows):
    """A graph per power of two."""
    return 10.0 + 3.0 * np.ceil(np.log2(np.maximum(rows, 4) / 4))


def show(curve, machine, rng, *, steps, max_rows, outliers=0.0):
    for _ in range(steps):
        rows = int(rng.integers(1, max_rows + 1))
        milliseconds = float(machine(rows)) * rng.lognormal(0, 0.03)
        if rng.random() < outliers:
            milliseconds *= rng.uniform(5, 10)
        curve.observe(rows, milliseconds)


def errors(curve, machine, rows):
    rows = np.asarray(rows)
    return np.abs(curve.milliseconds(rows) / machine(rows) - 1)


def made():
    return CostCurve(4, 1024)


@pytest.mark.parametrize(("machine", "mean", "most"), [(ramp, 0.03, 0.1), (stairs, 0.08, 0.35)])
def test_a_machine_is_learned_in_spite_of_hiccups(machine, mean, most):
    curve = made()
    assert not curve.is_known
    show(curve, machine, np.random.default_rng(1), steps=600, max_rows=64, outliers=0.02)
    error = errors(curve, machine, range(1, 65))
    assert error.mean() < mean
    assert error.max() < most
    assert curve.is_known
    times = curve.milliseconds(np.arange(1, 3000, 3))
    assert (times > 0).all()
    assert (np.diff(times) >= 0).all()
    before = curve.milliseconds(np.arange(1, 65))
    curve.observe(16, 1e6)
    curve.observe(16, 1e-3)
    np.testing.assert_allclose(curve.milliseconds(np.arange(1, 65)), before, rtol=0.15)


def test_unseen_sizes_are_interpolated():
    curve, rng = made(), np.random.default_rng(2)
    for _ in range(200):
        rows = int(rng.choice([4, 16, 128]))
        curve.observe(rows, float(ramp(rows)) * rng.lognormal(0, 0.03))
    assert errors(curve, ramp, [4, 16, 128]).max() < 0.05
    assert errors(curve, ramp, range(4, 129)).max() < 0.35


def test_a_machine_that_slows_down_is_followed_everywhere():
    curve, rng = made(), np.random.default_rng(3)
    show(curve, ramp, rng, steps=400, max_rows=64)
    show(curve, lambda rows: 1.5 * ramp(rows), rng, steps=40, max_rows=8)
    rows = np.array([4, 8, 32, 64])
    slower = curve.milliseconds(rows) / ramp(rows)
    assert (slower > 1.3).all()
    assert (slower < 1.6).all()


def test_times_that_are_not_positive_are_ignored():
    curve = made()
    before = curve.learned()
    for milliseconds in (0.0, -1.0, float("nan")):
        curve.observe(8, milliseconds)
    assert curve.learned() == before
    assert not curve.is_known


def test_a_mean_follows_changes_but_no_hiccup():
    mean, rng = MeanByOctave(), np.random.default_rng(4)
    assert mean.milliseconds(3) == 0.0
    for speed in (1.0, 2.0):
        for _ in range(300):
            hiccup = rng.uniform(5, 10) if rng.random() < 0.03 else 1.0
            for count in (3, 8):
                mean.observe(count, speed * count * hiccup)
        mean.observe(8, float("nan"))
        for count, near in ((3, 3), (8, 15), (8, 4000)):
            assert mean.milliseconds(near) == pytest.approx(speed * count, rel=0.1)
