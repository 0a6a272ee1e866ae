"""What a batch's steps cost and what its tokens are worth. Legend: B entries, N draft nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types import Batch
from spec_workers.budget.step_cost import StepCost
from spec_workers.budget.token_worth import token_worth

_PRICE_EVERY = 16
"""Steps of an unchanged batch that are priced alike."""

_BATCHES = 4
"""Whose prices are kept: parts of a batch may take turns."""


@dataclass(slots=True)
class Prices:
    """Of one batch. Milliseconds."""

    until: int  # the step
    width: int  # requests sampled from
    longest_context: int
    temperature: float  # mean of those requests
    decode_B: NDArray[np.float64]  # plain decode steps of 1, 2, ... of them alone
    with_nodes_N1: NDArray[np.float64]  # this step with 0, 1, ... draft nodes, without drafting
    worth_B: NDArray[np.float64]  # of a token of each entry


class KnownPrices:
    """Works prices out once for steps that are alike."""

    def __init__(self) -> None:
        self._kept: dict[tuple, Prices] = {}  # by what they depend on, latest last
        self._latest: tuple[Batch, Prices] | None = None

    def of(self, batch: Batch, cost: StepCost, step: int) -> Prices:
        """``step``: counts up."""
        latest = self._latest
        if latest is None or latest[0] is not batch or step >= latest[1].until:
            self._latest = latest = batch, self._like_before(batch, cost, step)
        return latest[1]

    def _like_before(self, batch: Batch, cost: StepCost, step: int) -> Prices:
        key = (
            batch.num_waiting == 0,
            tuple(
                (e.request.request_id, e.run_len, e.samples, e.draft_slots.size)
                for e in batch.entries
            ),
        )
        prices = self._kept.pop(key, None)
        if prices is None or step >= prices.until:
            prices = _prices(batch, cost, step + _PRICE_EVERY)
        self._kept[key] = prices
        if len(self._kept) > _BATCHES:
            del self._kept[next(iter(self._kept))]
        return prices


def _prices(batch: Batch, cost: StepCost, until: int) -> Prices:
    entries = batch.entries
    samples_B = np.array([entry.samples for entry in entries], dtype=bool)
    width = int(samples_B.sum())
    longest = max((entry.end for entry in entries), default=0)
    worth_B = np.zeros(len(entries))
    if not width:
        return Prices(until, 0, longest, 0.0, np.zeros(0), np.zeros(1), worth_B)
    nodes = np.arange(1 + sum(entry.draft_slots.size for entry in entries))
    decode_B = cost.of_decoding(width, longest)
    remaining = np.array([max(1.0, batch.expected_remaining(e)) for e in entries if e.samples])
    may_draft = nodes.size > 1  # else nobody chooses by worth: the even one, which is quick
    ends = may_draft and batch.num_waiting == 0
    worth_B[samples_B] = token_worth(remaining, decode_B, ends)
    with_nodes_N1 = cost.of_rows(batch.num_run_tokens + nodes, width + nodes, longest)
    temperature = sum(e.request.params.temperature for e in entries if e.samples) / width
    return Prices(until, width, longest, temperature, decode_B, with_nodes_N1, worth_B)
