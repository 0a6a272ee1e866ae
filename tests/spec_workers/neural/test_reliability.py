"""Estimates scaled by what came true of such ones."""

from __future__ import annotations

import numpy as np
import pytest

from spec_workers.neural.arrays import Arrays
from spec_workers.neural.mixture import Reliability, corrected


def overconfident(random, rows):
    """Estimates, what came true, and how likely it was: less than said where much was said."""
    estimates = random.random((rows, 6)).astype(np.float32)
    true = estimates * (1 - 0.5 * estimates)
    return estimates, random.random(estimates.shape) < true, true


def corrections(reliability, estimates, contexts):
    return corrected(Arrays(), estimates, contexts, reliability.tables())


def test_estimates_come_to_say_what_is_true():
    random, reliability = np.random.default_rng(0), Reliability()
    contexts = np.ones(50, dtype=np.int64)
    for _ in range(60):
        estimates, came_true, _ = overconfident(random, 50)
        reliability.learn(contexts, estimates, came_true)
    estimates, _, true = overconfident(random, 50)
    assert np.abs(corrections(reliability, estimates, contexts) - true).max() < 0.12
    untouched = np.zeros(50, dtype=np.int64)
    assert np.array_equal(corrections(reliability, estimates, untouched), estimates)


def test_what_is_said_stays_a_probability():
    random, reliability = np.random.default_rng(1), Reliability()
    contexts, estimates = np.zeros(50, dtype=np.int64), random.random((50, 6)) * 0.6
    for _ in range(60):
        reliability.learn(contexts, estimates, np.ones_like(estimates, dtype=bool))
    said = np.array([[0.0, 0.01, 0.5, 1.0]] * 50)
    found = corrections(reliability, said, contexts)
    assert found.dtype == np.float32
    assert found[0].tolist() == pytest.approx([0, found[0, 1], 1, 1])


def test_what_was_long_ago_is_forgotten():
    random, reliability = np.random.default_rng(2), Reliability()
    contexts, estimates = np.zeros(50, dtype=np.int64), np.full((50, 6), 0.5)
    for right in (0.1, 0.4):
        for _ in range(40):
            reliability.learn(contexts, estimates, random.random((50, 6)) < right)
    assert corrections(reliability, estimates, contexts).mean() == pytest.approx(0.4, abs=0.05)
