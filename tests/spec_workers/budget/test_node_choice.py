"""The chosen nodes are the best of every possible choice."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from spec_workers.budget.node_choice import choose_nodes, falling


def saved(counts_B, values_N, offsets_B1, token_ms_B):
    return sum(
        token_ms_B[b] * values_N[offsets_B1[b] : offsets_B1[b] + count].sum()
        for b, count in enumerate(counts_B)
    )


def ratio_of(counts_B, values_N, offsets_B1, token_ms_B, step_ms):
    return (step_ms[0] + saved(counts_B, values_N, offsets_B1, token_ms_B)) / step_ms[sum(counts_B)]


def random_case(rng, *, ties):
    sizes = rng.integers(0, 4, rng.integers(0, 5))
    offsets_B1 = np.concatenate([[0], np.cumsum(sizes)])
    values = np.round(rng.random(offsets_B1[-1]) * 3) / 3 if ties else rng.random(offsets_B1[-1])
    values_N = falling(values.astype(np.float32), offsets_B1)
    width = sizes.size
    token_ms_B = rng.choice([0.0, 1.0, 2.0], width) if ties else rng.random(width) * 3
    step_ms = 3 + np.cumsum(rng.random(values_N.size + 1) * rng.choice([0.0, 0.3, 3.0]))
    return values_N, offsets_B1, token_ms_B, step_ms


@pytest.mark.parametrize("ties", [False, True])
def test_no_other_choice_is_better(ties):
    rng = np.random.default_rng(1)
    some = 0
    for _ in range(300):
        case = random_case(rng, ties=ties)
        choice, sizes = choose_nodes(*case), np.diff(case[1])
        assert (choice.counts_B >= 0).all()
        assert (choice.counts_B <= sizes).all()
        assert choice.saved_ms == pytest.approx(saved(choice.counts_B, *case[:3]))
        assert choice.step_ms == case[3][choice.counts_B.sum()]
        every = product(*(range(size + 1) for size in sizes))
        best = max(ratio_of(counts, *case) for counts in every)
        assert ratio_of(choice.counts_B, *case) == pytest.approx(best, rel=1e-12)
        some += 0 < choice.counts_B.sum() < sizes.sum()
    assert some > 30


@pytest.mark.parametrize(
    ("values", "token_ms", "step_ms", "counts"),
    [
        ([0.9, 0.01, 0.5, 0.02], [1, 1], [5, 5, 5, 5, 5], [2, 2]),  # free
        ([0.9, 0.01, 0.5, 0.02], [1, 1], [5, 1e9, 1e9, 1e9, 1e9], [0, 0]),
        ([0.9, 0.0, 0.5, 0.0], [1, 1], [3, 3, 3, 3, 3], [1, 1]),  # free, and save nothing
        ([0.5, 0.5, 0.9, 0.9], [3, 1], [5, 5.5, 6, 9, 9], [2, 0]),  # the first's are worth more
    ],
)
def test_choices(values, token_ms, step_ms, counts):
    arrays = [np.array(each, dtype=np.float64) for each in (values, token_ms, step_ms)]
    choice = choose_nodes(arrays[0], np.array([0, 2, 4]), *arrays[1:])
    assert choice.counts_B.tolist() == counts


def test_falling_values_are_those_of_a_loop():
    rng = np.random.default_rng(2)
    for _ in range(100):
        sizes = rng.integers(0, 6, rng.integers(0, 80))
        offsets_B1 = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        values_N = rng.random(offsets_B1[-1]).astype(np.float32)
        values_N[rng.random(values_N.size) < 0.2] = rng.choice([0.0, 1.0, 1e-30])
        expected = values_N.astype(np.float64)
        for first, last in pairwise(offsets_B1.tolist()):
            expected[first:last] = np.minimum.accumulate(expected[first:last])
        np.testing.assert_allclose(falling(values_N, offsets_B1), expected, atol=1e-12)
