"""The chosen nodes are the best of every possible choice."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from spec_workers.budget.node_choice import choose_nodes, falling


def best_of_all(values_N, offsets_B1, token_ms_B, step_ms):
    """The highest ratio over all combinations of first nodes."""
    sizes = np.diff(offsets_B1)
    best = 0.0
    for counts in product(*(range(size + 1) for size in sizes)):
        best = max(best, ratio_of(counts, values_N, offsets_B1, token_ms_B, step_ms))
    return best


def ratio_of(counts_B, values_N, offsets_B1, token_ms_B, step_ms):
    return (step_ms[0] + saved(counts_B, values_N, offsets_B1, token_ms_B)) / step_ms[sum(counts_B)]


def saved(counts_B, values_N, offsets_B1, token_ms_B):
    return sum(
        token_ms_B[b] * values_N[offsets_B1[b] : offsets_B1[b] + count].sum()
        for b, count in enumerate(counts_B)
    )


def random_case(rng, *, ties=False):
    sizes = rng.integers(0, 4, rng.integers(1, 5))
    offsets_B1 = np.concatenate([[0], np.cumsum(sizes)])
    values = np.round(rng.random(offsets_B1[-1]) * 3) / 3 if ties else rng.random(offsets_B1[-1])
    values_N = falling(values.astype(np.float32), offsets_B1)
    width = sizes.size
    token_ms_B = rng.choice([0.0, 1.0, 2.0], width) if ties else rng.random(width) * 3
    step_ms = 3 + np.cumsum(rng.random(values_N.size + 1) * rng.choice([0.0, 0.3, 3.0]))
    return values_N, offsets_B1, token_ms_B, step_ms


@pytest.mark.parametrize("ties", [False, True])
def test_no_other_choice_is_better(ties):
    """For a given number of nodes the best are those worth most, so none is missed."""
    rng = np.random.default_rng(1)
    some = 0
    for _ in range(300):
        case = random_case(rng, ties=ties)
        choice = choose_nodes(*case)
        sizes = np.diff(case[1])
        assert choice.counts_B.shape == sizes.shape
        assert (choice.counts_B >= 0).all()
        assert (choice.counts_B <= sizes).all()
        assert choice.saved_ms == pytest.approx(saved(choice.counts_B, *case[:3]))
        assert choice.step_ms == case[3][choice.counts_B.sum()]
        assert ratio_of(choice.counts_B, *case) == pytest.approx(best_of_all(*case), rel=1e-12)
        some += 0 < choice.counts_B.sum() < sizes.sum()
    assert some > 30


def test_no_nodes():
    offsets_B1 = np.zeros(4, np.int64)
    choice = choose_nodes(np.zeros(0), offsets_B1, np.ones(3), np.array([2.0]))
    assert choice.counts_B.tolist() == [0, 0, 0]
    assert (choice.saved_ms, choice.step_ms) == (0.0, 2.0)


def test_no_entries():
    choice = choose_nodes(np.zeros(0), np.zeros(1, np.int64), np.zeros(0), np.array([2.0]))
    assert choice.counts_B.size == 0


@pytest.mark.parametrize(
    ("cost_ms", "counts"),
    [([5.0, 5.0, 5.0, 5.0, 5.0], [2, 2]), ([5.0, 1e9, 1e9, 1e9, 1e9], [0, 0])],
)
def test_free_nodes_are_all_taken_and_dear_ones_none(cost_ms, counts):
    values_N, offsets_B1 = np.array([0.9, 0.01, 0.5, 0.02]), np.array([0, 2, 4])
    choice = choose_nodes(values_N, offsets_B1, np.ones(2), np.array(cost_ms))
    assert choice.counts_B.tolist() == counts


def test_tokens_of_a_request_that_are_worth_more_are_taken_first():
    values_N, offsets_B1 = np.array([0.5, 0.5, 0.9, 0.9]), np.array([0, 2, 4])
    choice = choose_nodes(
        values_N, offsets_B1, np.array([3.0, 1.0]), np.array([5.0, 5.5, 6.0, 9, 9])
    )
    assert choice.counts_B.tolist() == [2, 0]
    assert choice.saved_ms == 3.0


def test_nodes_that_save_nothing_are_not_taken_even_for_nothing():
    values_N, offsets_B1 = np.array([0.9, 0.0, 0.5, 0.0]), np.array([0, 2, 4])
    choice = choose_nodes(values_N, offsets_B1, np.ones(2), np.full(5, 3.0))
    assert choice.counts_B.tolist() == [1, 1]


def test_falling_is_that_of_a_loop():
    rng = np.random.default_rng(2)
    for _ in range(100):
        sizes = rng.integers(0, 6, rng.integers(0, 80))
        offsets_B1 = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        values_N = rng.random(offsets_B1[-1]).astype(np.float32)
        values_N[rng.random(values_N.size) < 0.2] = rng.choice([0.0, 1.0, 1e-30])
        expected = values_N.astype(np.float64)
        for first, last in pairwise(offsets_B1.tolist()):
            for node in range(first + 1, last):
                expected[node] = min(expected[node], expected[node - 1])
        lowered_N = falling(values_N, offsets_B1)
        np.testing.assert_allclose(lowered_N, expected, atol=1e-12)
        assert (lowered_N >= 0).all()
        entry_N = np.repeat(np.arange(sizes.size), sizes)
        assert (np.diff(lowered_N)[np.diff(entry_N) == 0] <= 0).all()
