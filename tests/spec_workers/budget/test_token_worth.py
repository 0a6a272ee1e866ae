"""The worth of a token against schedules played to their end."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.types import Remaining
from spec_workers.budget.token_worth import AcceptRate, last_alone, token_ms

ENDLESS = 1e12
FIXED, ROW = 10.0, 1.5  # milliseconds of a plain step, and for each of its requests


def step_ms(running):
    return np.where(running > 0, FIXED + ROW * running, 0.0)


def whole_ms(lengths_SB):
    """Milliseconds until all have ended, of each schedule S whose requests emit so many tokens."""
    steps = np.arange(1, int(lengths_SB.max()) + 1)
    running_ST = (lengths_SB[:, :, None] >= steps).sum(axis=1)
    return step_ms(running_ST).sum(axis=1)


def saved_ms(lengths_SB):
    """What one token less of each request saves, on average over the schedules: [B]."""
    less = np.eye(lengths_SB.shape[1], dtype=np.int64)
    return np.array([(whole_ms(lengths_SB) - whole_ms(lengths_SB - one)).mean() for one in less])


def worth(remaining, accept_rate=0.0):
    width = len(remaining)
    plain_ms, alone_ms = (float(step_ms(np.array(count))) for count in (width, 1))
    return token_ms(plain_ms, alone_ms, width, last_alone(remaining, accept_rate))


@pytest.mark.parametrize("longest", [1, 12, 500])
def test_where_all_lengths_are_known_it_is_what_a_token_less_saves(longest):
    rng = np.random.default_rng(longest)
    for _ in range(60):
        limits = rng.integers(1, longest + 1, rng.integers(1, 9))
        remaining = [Remaining(ENDLESS, int(limit)) for limit in limits]
        expected = saved_ms(limits[None])
        np.testing.assert_allclose(worth(remaining), expected, atol=0.05 * FIXED)


def test_where_requests_end_by_chance_it_is_what_a_token_less_saves_on_average():
    rng = np.random.default_rng(1)
    for _ in range(30):
        width = int(rng.integers(1, 6))
        limits, means = rng.integers(2, 80, width), rng.integers(3, 150, width)
        remaining = [Remaining(float(m), int(n)) for m, n in zip(means, limits, strict=True)]
        lengths_SB = np.minimum(rng.geometric(1 / means, (2000, width)), limits)
        expected = saved_ms(lengths_SB)
        np.testing.assert_allclose(worth(remaining), expected, atol=0.12 * FIXED)


def test_requests_that_are_alike_and_seldom_end_together_share_a_step():
    for width in (1, 2, 256):
        each = worth([Remaining(400.0, 100_000)] * width)
        np.testing.assert_allclose(each, float(step_ms(np.array(width))) / width, rtol=0.04)


@pytest.mark.parametrize("rate", [0.06, 3.0])
def test_at_one_limit_it_is_near_what_the_tokens_of_all_save(rate):
    """Sixteen requests end at one limit of 48 tokens. Drafts save a step that none of them
    needs any more, which is little of what a share of the step for each token would promise."""
    rng, width, limit = np.random.default_rng(3), 16, 48
    steps_SB = np.array([
        [np.searchsorted(np.cumsum(1 + rng.poisson(rate, limit)), limit) + 1 for _ in range(width)]
        for _ in range(200)
    ])  # fmt: skip
    tokens = width * limit - steps_SB.sum(axis=1).mean()
    truth = (whole_ms(np.full((1, width), limit))[0] - whole_ms(steps_SB).mean()) / tokens
    ours = worth([Remaining(ENDLESS, limit)] * width, rate).mean()
    share = float(step_ms(np.array(width))) / width
    assert abs(ours - truth) < 0.12 * share, (ours, truth, share)


def test_the_last_one_is_worth_most_and_one_that_falls_behind_becomes_it():
    remaining = [Remaining(ENDLESS, limit) for limit in (40, 40, 40, 44)]
    each = worth(remaining, 0.02)
    assert each[3] > 0.9 * (FIXED + ROW)
    assert each[:3].max() < 0.2 * FIXED + ROW
    before = 0.0
    for limit in range(38, 46):  # smoothly
        own = worth([*remaining[:3], Remaining(ENDLESS, limit)], 0.5)[3]
        assert before - 1e-9 <= own < before + 0.3 * FIXED + ROW
        before = own


def test_the_rate_follows_what_is_accepted_and_returns_where_nothing_is_verified():
    rate = AcceptRate()
    first = rate.value
    for _ in range(100):
        rate.observe(2.0)
    assert 1.6 < rate.value < 2.0
    for _ in range(300):
        rate.observe(0.0)
    assert rate.value < 0.3 * first
    for _ in range(600):
        rate.fade()
    assert rate.value > 0.95 * first
