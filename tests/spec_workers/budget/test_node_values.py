"""Estimates of draft nodes, corrected by what was accepted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spec_workers.budget.node_values import DEPTHS, NodeValues

SOURCES = ("group", "live", "external")


def show(values, rng, truth, *, steps=400, size=20, depths=(1, 2, 3, 5, 9)):
    """``truth``: of a source, how many times as probable its nodes are as they are said to be."""
    for _ in range(steps):
        sources_N = rng.integers(0, len(SOURCES), size).astype(np.uint8)
        depths_N = rng.choice(depths, size).astype(np.int32)
        probs_N = rng.uniform(0.05, 0.5, size).astype(np.float32)
        accepted_N = rng.random(size) < probs_N * np.array(truth)[sources_N]
        values.observe(probs_N, sources_N, depths_N, accepted_N)


def ratio(values, source, depth, prob=0.2):
    corrected = values.corrected(
        np.array([prob], np.float32), np.array([source], np.uint8), np.array([depth], np.int32)
    )
    assert corrected.dtype == np.float64
    return float(corrected[0]) / prob


FIRST_GUESS = 0.85  # the most probable of many estimates are too high


def test_of_nothing_seen_the_first_guess_is_told():
    values = NodeValues(SOURCES)
    for source in range(len(SOURCES)):
        assert ratio(values, source, 1) == pytest.approx(FIRST_GUESS)
    values.observe(np.zeros(0), np.zeros(0, np.uint8), np.zeros(0, np.int32), np.zeros(0, bool))
    assert ratio(values, 2, 63) == pytest.approx(FIRST_GUESS)


def test_sources_are_corrected_each_for_itself():
    values = NodeValues(SOURCES)
    show(values, np.random.default_rng(1), (0.5, 1.0, 1.8))
    for depth in (1, 2, 3, 4, 5, 60):
        assert ratio(values, 0, depth) == pytest.approx(0.5, abs=0.12)
        assert ratio(values, 1, depth) == pytest.approx(1.0, abs=0.15)
        assert ratio(values, 2, depth) == pytest.approx(1.8, abs=0.2)


def test_depths_are_corrected_each_for_itself():
    values = NodeValues(SOURCES)
    show(values, np.random.default_rng(2), (0.5, 0.5, 0.5), depths=(3, 4))
    assert ratio(values, 0, 3) < 0.7
    assert ratio(values, 0, 4) < 0.7
    for depth in (1, 2, 5):
        assert ratio(values, 0, depth) == pytest.approx(FIRST_GUESS)


def test_values_are_probabilities():
    values = NodeValues(SOURCES)
    show(values, np.random.default_rng(3), (2.0, 2.0, 2.0))
    assert ratio(values, 0, 1, prob=0.9) == pytest.approx(1 / 0.9)


def test_a_source_that_changes_is_followed():
    values, rng = NodeValues(SOURCES), np.random.default_rng(4)
    show(values, rng, (1.0, 1.0, 1.0), steps=2000)
    show(values, rng, (0.5, 1.0, 1.0), steps=2000)
    assert ratio(values, 0, 1) == pytest.approx(0.5, abs=0.12)


def test_a_new_policy_counts_for_more():
    values = NodeValues(SOURCES)
    show(values, np.random.default_rng(5), (0.3, 1.0, 1.0))
    ratios = [ratio(values, 0, 1)]
    for _ in range(12):
        values.decay()
        ratios.append(ratio(values, 0, 1))
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.5
    assert ratios[-1] == pytest.approx(FIRST_GUESS, abs=0.02)


def test_the_table_of_calibration_is_of_values_as_they_were_used():
    """Measured against what was known before each step, or it would flatter itself."""
    values, rng = NodeValues(SOURCES), np.random.default_rng(6)
    count, expected, accepted = np.zeros((3, 10))
    for _ in range(50):
        probs_N = rng.random(6)
        sources_N, depths_N = rng.integers(0, 3, 6), rng.integers(1, 9, 6)
        accepted_N = rng.random(6) < 0.5 * probs_N
        used_N = values.corrected(probs_N, sources_N, depths_N)
        values.observe(probs_N, sources_N, depths_N, accepted_N)
        for used, taken in zip(used_N, accepted_N, strict=True):
            tenth = min(int(used * 10), 9)
            count[tenth] += 1
            expected[tenth] += used
            accepted[tenth] += taken
    table = values.learned()["calibration"]
    assert table["count"] == count.tolist()
    assert table["accepted"] == accepted.tolist()
    np.testing.assert_allclose(table["expected"], expected, atol=2e-3)


@pytest.mark.parametrize("truth", [(0.5, 1.0, 1.5), (2.0, 2.0, 2.0)])
def test_restored_it_is_the_same(truth):
    values, other = NodeValues(SOURCES), NodeValues(SOURCES)
    show(values, np.random.default_rng(7), truth)
    other.restore(json.loads(json.dumps(values.learned()["values"])))
    for source in range(3):
        for depth in (1, 2, 3, 5):
            assert ratio(other, source, depth) == pytest.approx(
                ratio(values, source, depth), rel=1e-3
            )


def test_however_far_off_the_estimates_were_they_are_restored():
    """A drafter may think twenty times too little of its nodes."""
    values, other = NodeValues(SOURCES), NodeValues(SOURCES)
    ones = np.ones(60, np.int64)
    for _ in range(200):
        values.observe(np.full(60, 0.05), ones, ones, np.ones(60, bool))
    other.restore(values.learned()["values"])
    assert ratio(other, 1, 1, 0.03) == pytest.approx(ratio(values, 1, 1, 0.03))


def test_what_was_learned_at_length_can_be_unlearned():
    values, rng = NodeValues(SOURCES), np.random.default_rng(8)
    learned = values.learned()["values"]
    learned["expected"] = [[1e12] * len(DEPTHS)] * len(SOURCES)
    values.restore(learned)
    show(values, rng, (1.0, 1.0, 1.0), steps=1500)
    assert ratio(values, 0, 1) > 0.7


@pytest.mark.parametrize(
    "damage",
    [
        {"sources": ["group", "live"]},
        {"sources": None},
        {"depths": ["1"]},
        {"expected": None},
        {"expected": {}},
        {"expected": [[1.0]]},
        {"accepted": [[-1.0] * len(DEPTHS)] * len(SOURCES)},
        {"accepted": [[float("inf")] * len(DEPTHS)] * len(SOURCES)},
        {"accepted": [["a"] * len(DEPTHS)] * len(SOURCES)},
    ],
)
def test_what_is_damaged_is_refused(damage):
    values = NodeValues(SOURCES)
    show(values, np.random.default_rng(9), (0.5, 0.5, 0.5), steps=5)
    before = values.learned()
    with pytest.raises(ValueError, match=r"sources|expected|accepted"):
        values.restore(before["values"] | damage)
    assert values.learned() == before


def test_a_source_without_a_name_is_an_error():
    values = NodeValues(SOURCES)
    with pytest.raises(IndexError):
        ratio(values, len(SOURCES), 1)


def test_a_source_nobody_verifies_any_more_gets_another_chance():
    values, ones = NodeValues(SOURCES), np.ones(200, np.int32)
    values.observe(ones * 0.5, ones.astype(np.uint8), ones, np.zeros(200, bool))
    assert ratio(values, 1, 1) < 0.2
    for _ in range(1000):
        values.fade()
    assert ratio(values, 1, 1) > 0.8
