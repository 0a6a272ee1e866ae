"""Prices are worked out once for batches that are alike, also where these take turns."""

from __future__ import annotations

import numpy as np

from rollout.types import Batch
from spec_workers.budget.prices import KnownPrices
from tests.helpers.budgets import entry_of


class CountingCost:
    """A step takes a millisecond a row."""

    def __init__(self) -> None:
        self.asked = 0

    def of_rows(self, rows: np.ndarray, sampled: np.ndarray, longest_context: int) -> np.ndarray:
        self.asked += rows.size == 1  # the plain step's
        return rows.astype(float)


def batch_of(ids, slots=3) -> Batch:
    return Batch(step=0, entries=[entry_of(number, slots=slots) for number in ids])


def test_halves_that_take_turns_keep_their_prices() -> None:
    known, cost = KnownPrices(), CountingCost()
    first = known.of(batch_of([0, 1]), cost, 0, 0.5)
    other = known.of(batch_of([2, 3, 4]), cost, 0, 0.5)
    for step in range(1, 16):
        assert known.of(batch_of([0, 1]), cost, step, 0.5) is first
        assert known.of(batch_of([2, 3, 4]), cost, step, 0.5) is other
    assert cost.asked == 2
    assert (first.width, other.width) == (2, 3)
    assert known.of(batch_of([0, 1]), cost, 16, 0.5) is not first  # contexts grew meanwhile
    assert cost.asked == 3


def test_what_prices_depend_on_is_priced_anew() -> None:
    known, cost = KnownPrices(), CountingCost()
    batches = [batch_of([0, 1]), batch_of([0, 2]), batch_of([0, 1], slots=1)]
    for count, batch in enumerate(batches, start=1):
        known.of(batch, cost, 0, 0.5)
        assert known.of(batch, cost, 0, 0.5) is known.of(batch, cost, 1, 0.5)
        assert cost.asked == count


def test_few_batches_are_remembered() -> None:
    known, cost = KnownPrices(), CountingCost()
    for number in range(5):
        known.of(batch_of([number]), cost, 0, 0.5)
    known.of(batch_of([4]), cost, 0, 0.5)
    assert cost.asked == 5
    known.of(batch_of([0]), cost, 0, 0.5)
    assert cost.asked == 6
