"""What a token is worth to a step that ends with its last request."""

from __future__ import annotations

import numpy as np
import pytest

from spec_workers.budget import prices as module
from spec_workers.budget.prices import token_worth

RISING = 10.0 + np.arange(1, 9)  # of 1 to 8 requests
FLAT = np.full(8, 12.0)


def simulated(remaining_B, decode_ms_B, rng, trials=4000):
    """Mean time spared when one request ends a step sooner, its lifetime being exponential."""
    lives = rng.exponential(remaining_B, (trials, remaining_B.size))
    survivors = np.argsort(np.argsort(-lives, axis=1), axis=1)
    return np.diff(decode_ms_B, prepend=0.0)[survivors].mean(0)


@pytest.mark.parametrize("decode_ms_B", [RISING, FLAT, np.arange(1.0, 9.0)])
@pytest.mark.parametrize("ends", [False, True])
def test_together_they_are_a_step(decode_ms_B, ends):
    rng = np.random.default_rng(1)
    for size in range(1, 9):
        remaining_B = rng.exponential(100, size) + 1
        worth_B = token_worth(remaining_B, decode_ms_B[:size], ends)
        assert worth_B.shape == (size,)
        assert (worth_B >= 0).all()
        assert worth_B.sum() == pytest.approx(decode_ms_B[size - 1])


def test_while_others_wait_all_are_worth_the_same():
    worth_B = token_worth(np.array([1.0, 10, 1e6]), np.array([5.0, 6, 9]), ends=False)
    assert worth_B.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("size", [1, 2, 8, 300, 2000])
def test_equal_ones_are_worth_the_same(size):
    """However many: and where none but the last costs anything."""
    for decode_ms_B in (np.full(size, 12.0), 10 + 0.1 * np.arange(size)):
        worth_B = token_worth(np.full(size, 50.0), decode_ms_B, ends=True)
        np.testing.assert_allclose(worth_B, decode_ms_B[-1] / size, rtol=1e-6)


def test_on_a_flat_curve_the_longest_is_worth_nearly_all():
    worth_B = token_worth(np.array([10.0, 10, 20, 2000]), FLAT[:4], ends=True)
    assert worth_B[3] > 0.8 * FLAT[3]
    assert (np.diff(worth_B) >= -1e-12).all()


def test_where_all_cost_alike_length_does_not_matter():
    worth_B = token_worth(np.array([1.0, 10, 500, 1e6]), 3.0 * np.arange(1, 5), ends=True)
    np.testing.assert_allclose(worth_B, 3.0)


def test_extreme_lengths():
    for remaining in ([1.0, 1e6], [1.0, 1e6, 1e6], [1e-3, 1.0, 1e12], [1.0] * 7 + [1e6]):
        size = len(remaining)
        worth_B = token_worth(np.array(remaining), FLAT[:size], ends=True)
        assert np.isfinite(worth_B).all()
        assert worth_B.sum() == pytest.approx(FLAT[0])
        assert worth_B[0] == worth_B.min()


def test_it_is_about_what_a_simulation_says():
    rng = np.random.default_rng(2)
    for _ in range(20):
        size = int(rng.integers(2, 9))
        remaining_B = rng.exponential(100, size) + 1
        decode_ms_B = 10 + np.cumsum(rng.uniform(0, 2, size))
        worth_B = token_worth(remaining_B, decode_ms_B, ends=True)
        truth_B = simulated(remaining_B, decode_ms_B, rng)
        assert np.abs(worth_B - truth_B).max() < 0.15 * decode_ms_B[-1]
        assert np.corrcoef(worth_B, truth_B)[0, 1] > 0.9


@pytest.mark.parametrize("size", [65, 100, 512, 1500])
@pytest.mark.parametrize("lengths", ["exponential", "lognormal", "uniform", "capped", "two kinds"])
@pytest.mark.parametrize("curve", ["flat", "ramp", "rising"])
def test_large_batches_are_worth_about_what_each_by_itself_would_be(
    monkeypatch, size, lengths, curve
):
    rng = np.random.default_rng(size)
    remaining_B = {
        "exponential": rng.exponential(100, size) + 1,
        "lognormal": rng.lognormal(5, 1.5, size) + 1,
        "uniform": rng.uniform(1, 1000, size),
        "capped": np.minimum(rng.lognormal(6, 1.5, size), 4096),
        "two kinds": np.where(rng.random(size) < 0.03, 5000, 50) * rng.uniform(0.9, 1.1, size),
    }[lengths]
    decode_ms_B = {
        "flat": np.full(size, 12.0),
        "ramp": np.maximum(14.0, 8 + 0.8 * np.arange(1, size + 1)),
        "rising": 10 + 0.05 * np.arange(size),
    }[curve]
    worth_B = token_worth(remaining_B, decode_ms_B, ends=True)
    monkeypatch.setattr(module, "_MAX_EXACT", size)
    exact_B = token_worth(remaining_B, decode_ms_B, ends=True)
    assert worth_B.sum() == pytest.approx(decode_ms_B[-1])
    assert np.abs(worth_B - exact_B).sum() < 0.01 * decode_ms_B[-1]
    dear_B = exact_B > decode_ms_B[-1] / size
    np.testing.assert_allclose(worth_B[dear_B], exact_B[dear_B], rtol=0.05)
