"""Bins of estimates."""

from __future__ import annotations

import numpy as np
from calibration import deciles, largest_gap, tenths


def test_deciles_have_equal_counts_even_of_equal_estimates():
    bins = deciles(np.full(1000, 0.5, np.float32), np.arange(1000) % 2 == 0)
    assert bins.count_K.tolist() == [100] * 10
    assert largest_gap(bins) == 0


def test_a_decile_that_is_off_is_found():
    estimates_J = np.linspace(0, 1, 10_000, dtype=np.float32)
    accepted_J = np.random.default_rng(0).random(10_000) < estimates_J
    assert largest_gap(deciles(estimates_J, accepted_J)) < 0.05
    accepted_J[2000:3000] = True  # where 0.25 is estimated
    gaps = np.abs(deciles(estimates_J, accepted_J).estimate_K - 0.25)
    assert gaps.argmin() == 2
    assert abs(largest_gap(deciles(estimates_J, accepted_J)) - 0.75) < 0.01


def test_tenths_leave_out_small_bins():
    estimates_J = np.array([0.05] * 300 + [0.55] * 199 + [1.0] * 200, np.float32)
    bins = tenths(estimates_J, np.zeros(699, np.bool_))
    assert bins.count_K.tolist() == [300, 200]
    np.testing.assert_allclose(bins.estimate_K, [0.05, 1.0], rtol=1e-6)
    assert largest_gap(bins) == 1


def test_nothing_judged_is_off_by_nothing():
    nothing = np.empty(0, np.float32), np.empty(0, np.bool_)
    assert largest_gap(deciles(*nothing)) == 0
    assert largest_gap(tenths(*nothing)) == 0
