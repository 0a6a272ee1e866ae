"""Estimates of draft nodes, corrected by what was accepted: by source, depth and request."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from spec_workers.budget.node_values import DEPTHS, NodeValues, RequestTrust

SOURCES = ("group", "live", "external")
FIRST_GUESS = 0.85


def show(values, rng, truth, *, steps=400, size=20, depths=(1, 2, 3, 5, 9)):
    """``truth``: of each source, how many times as probable its nodes are as it says."""
    for _ in range(steps):
        sources_N = rng.integers(0, len(SOURCES), size).astype(np.uint8)
        depths_N = rng.choice(depths, size).astype(np.int32)
        probs_N = rng.uniform(0.05, 0.5, size).astype(np.float32)
        accepted_N = rng.random(size) < probs_N * np.array(truth)[sources_N]
        values.observe(probs_N, sources_N, depths_N, accepted_N)
    return values


def ratio(values, source, depth, prob=0.2):
    corrected = values.corrected(
        np.array([prob], np.float32), np.array([source], np.uint8), np.array([depth], np.int32)
    )
    return float(corrected[0]) / prob


def test_sources_and_depths_are_corrected_each_for_itself():
    values = NodeValues(SOURCES)
    for source in range(3):
        assert ratio(values, source, 1 + 31 * source) == pytest.approx(FIRST_GUESS)
    show(values, np.random.default_rng(2), (0.5, 0.5, 0.5), depths=(3, 4))
    assert ratio(values, 0, 3) == ratio(values, 0, 4) < 0.7
    for depth in (1, 2, 5):
        assert ratio(values, 0, depth) == pytest.approx(FIRST_GUESS)
    for truth in ((1.8, 0.5, 1.0), (0.5, 1.0, 1.8)):  # a change is followed
        show(values, np.random.default_rng(1), truth, steps=3000)
        for source, depth in product(range(3), (1, 2, 3, 4, 5, 60)):
            assert ratio(values, source, depth) == pytest.approx(truth[source], abs=0.25)
    assert ratio(values, 2, 1, prob=0.9) == pytest.approx(1 / 0.9), "at most 1"
    assert values.highest_ratio == pytest.approx(1.8, abs=0.2)


@pytest.mark.parametrize(("forget", "times"), [("decay", 12), ("fade", 1000)])
def test_new_policies_and_time_lead_back_to_the_first_guess(forget, times):
    values = show(NodeValues(SOURCES), np.random.default_rng(5), (0.3, 1.0, 1.0))
    ratios = [ratio(values, 0, 1)]
    for _ in range(times):
        getattr(values, forget)()
        ratios.append(ratio(values, 0, 1))
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.5
    assert ratios[-1] == pytest.approx(FIRST_GUESS, abs=0.03)


def test_the_calibration_counts_values_as_they_were_used():
    values, rng = NodeValues(SOURCES), np.random.default_rng(6)
    count, expected, accepted = np.zeros((3, 10))
    for _ in range(50):
        probs_N = rng.random(6)
        sources_N, depths_N = rng.integers(0, 3, 6), rng.integers(1, 9, 6)
        accepted_N = rng.random(6) < 0.5 * probs_N
        used_N = values.corrected(probs_N, sources_N, depths_N)
        values.observe(probs_N, sources_N, depths_N, accepted_N)
        tenths_N = np.minimum((used_N * 10).astype(int), 9)
        np.add.at(count, tenths_N, 1)
        np.add.at(expected, tenths_N, used_N)
        np.add.at(accepted, tenths_N, accepted_N)
    table = values.learned()["calibration"]
    assert table["count"] == count.tolist()
    assert table["accepted"] == accepted.tolist()
    np.testing.assert_allclose(table["expected"], expected, atol=2e-3)


def test_restored_it_is_the_same_however_far_off_estimates_were():
    values, other = NodeValues(SOURCES), NodeValues(SOURCES)
    show(values, np.random.default_rng(7), (0.5, 1.0, 1.5))
    ones = np.ones(60, np.int64)
    for _ in range(200):
        values.observe(np.full(60, 0.02), 2 * ones, ones, np.ones(60, bool))
    learned = json.loads(json.dumps(values.learned()["values"]))
    other.restore(learned)
    for source, depth in np.ndindex(3, 6):
        expected = ratio(values, source, depth, 0.01)
        assert ratio(other, source, depth, 0.01) == pytest.approx(expected, rel=1e-3)
    learned["expected"] = [[1e12] * len(DEPTHS)] * len(SOURCES)  # it can be unlearned all the same
    values.restore(learned)
    show(values, np.random.default_rng(8), (1.0, 1.0, 1.0), steps=1500)
    assert ratio(values, 0, 1) > 0.7


def test_malformed_values_are_refused_whole():
    values = show(NodeValues(SOURCES), np.random.default_rng(9), (0.5, 0.5, 0.5), steps=5)
    before = values.learned()
    for damage in (
        {"sources": ["group", "live"]},
        {"depths": ["1"]},
        {"expected": [[1.0]]},
        {"accepted": [[-1.0] * len(DEPTHS)] * len(SOURCES)},
    ):
        with pytest.raises(ValueError, match=next(iter(damage))):
            values.restore(before["values"] | damage)
        assert values.learned() == before


def test_requests_are_trusted_each_for_itself():
    trust, rng = RequestTrust(), np.random.default_rng(1)
    assert trust.ratios([7, 3, 7]).tolist() == [1.0, 1.0, 1.0]
    trust.observe(1, 0.5, 0)
    trust.observe(2, 0.5, 3)
    low, unknown, high = trust.ratios([1, 3, 2])
    assert 0.85 < low < unknown == 1.0 < high < 1.6, "a little tells little"
    for truth, steps in (((1.0, 1.8), 200), ((0.3, 1.8), 40)):
        for _, request_id in product(range(steps), (1, 2)):
            accepted = int((rng.random(8) < 0.25 * truth[request_id - 1]).sum())
            trust.observe(request_id, 2.0, accepted)
        assert trust.ratios([1, 2]) == pytest.approx(truth, abs=0.45)
    for request_id in (1, 999):
        trust.forget(request_id)
    assert trust.ratios([1, 2])[0] == 1.0 != trust.ratios([2])[0]
