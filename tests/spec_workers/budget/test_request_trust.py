"""How far the drafts of one request are believed."""

from __future__ import annotations

import numpy as np
import pytest

from spec_workers.budget.node_values import RequestTrust


def show(trust, request_id, ratio, rng, *, steps=200, size=8):
    for _ in range(steps):
        probs_N = rng.uniform(0.05, 0.5, size)
        accepted = int((rng.random(size) < ratio * probs_N).sum())
        trust.observe(request_id, float(probs_N.sum()), accepted)


def test_of_a_request_never_seen_nothing_is_known():
    trust = RequestTrust()
    ratios_B = trust.ratios([7, 3, 7])
    assert ratios_B.dtype == np.float64
    assert ratios_B.tolist() == [1.0, 1.0, 1.0]
    assert trust.ratios([]).shape == (0,)


def test_requests_are_believed_each_for_itself():
    trust, rng = RequestTrust(), np.random.default_rng(1)
    for _ in range(20):
        for request_id, ratio in ((3, 0.3), (5, 1.0), (9, 1.8)):
            show(trust, request_id, ratio, rng, steps=10)
    low, unknown, even, high = trust.ratios([3, 4, 5, 9])
    assert low == pytest.approx(0.3, abs=0.25)
    assert unknown == 1.0
    assert even == pytest.approx(1.0, abs=0.35)
    assert high == pytest.approx(1.8, abs=0.45)


def test_a_little_tells_little():
    trust = RequestTrust()
    trust.observe(1, 0.5, 0)
    trust.observe(2, 0.5, 3)
    low, high = trust.ratios([1, 2])
    assert 0.85 < low < 1.0
    assert 1.0 < high < 1.6


def test_one_that_changes_its_ways_is_followed():
    trust, rng = RequestTrust(), np.random.default_rng(2)
    show(trust, 1, 1.0, rng, steps=2000)
    show(trust, 1, 0.2, rng, steps=40)
    assert trust.ratios([1])[0] < 0.55


def test_it_lies_between_the_ratio_seen_and_one():
    trust, rng = RequestTrust(), np.random.default_rng(3)
    expected = accepted = 0.0
    for _ in range(10):
        trust.observe(1, 2.0, taken := int(rng.integers(0, 6)))
        expected, accepted = expected + 2.0, accepted + taken
        seen = accepted / expected
        assert min(seen, 1.0) <= trust.ratios([1])[0] <= max(seen, 1.0)


def test_what_ended_is_forgotten():
    trust = RequestTrust()
    for request_id in range(50):
        trust.observe(request_id, 4.0, 0)
        trust.forget(request_id)
    trust.forget(999)  # never drafted for
    assert trust.ratios([0, 49]).tolist() == [1.0, 1.0]
    assert not trust._seen
