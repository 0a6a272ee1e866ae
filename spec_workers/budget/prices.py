"""Prices of a batch's draft nodes, in ms of plain decoding.

Legend: B entries of a batch, N draft nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types import Batch, StepForecast
from spec_workers.budget.step_cost import StepCost
from spec_workers.budget.token_worth import last_alone, token_ms

_PRICE_EVERY = 16
_PRICE_EVERY_PLAIN = 128
_PRICE_EVERY_TAIL = 4
"""Steps of an unchanged batch that are priced alike. The second number counts where nothing can be
bought. Where no request waits, each accepted token may change which request ends last: there it is
a fourth of the batch's width, at least the third number, since a wide batch takes longer to price
and each of its requests matters less."""

_BATCHES = 4
"""Batches whose prices are remembered at once: steps with and without a prompt may alternate."""


@dataclass(slots=True)
class Prices:
    """The prices of one batch, in milliseconds."""

    until: int  # the step
    width: int  # requests sampled from
    longest_context: int
    temperature: float  # mean of those requests
    decode_ms: float  # a plain decode step of them alone
    with_nodes_N1: NDArray[np.float64]  # this step with 0, 1, ... draft nodes, without drafting
    token_ms_B: NDArray[np.float64]  # of plain decoding that one emitted token of each saves
    cheapest_ms: float = 0.0  # that a draft node adds to the step at least
    is_hopeless: bool = False  # at the last `floors`, not even certain tokens would have paid
    plain_forecast: StepForecast | None = None  # of a step without drafts; None: not asked for yet


class KnownPrices:
    """Prices of recent batches, which are computed once for steps that are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple, Prices] = {}  # by what they depend on, latest last
        self._latest: tuple[Batch, Prices] | None = None

    def of(self, batch: Batch, cost: StepCost, step: int, accept_rate: float) -> Prices:
        """The prices of a batch.

        Args:
            step: a number that grows from step to step.
            accept_rate: draft tokens accepted per request and step.
        """
        latest = self._latest
        if latest is None or latest[0] is not batch or step >= latest[1].until:
            self._latest = latest = batch, self._like_before(batch, cost, step, accept_rate)
        return latest[1]

    def _like_before(self, batch: Batch, cost: StepCost, step: int, accept_rate: float) -> Prices:
        key = _key(batch)
        prices = self._known.pop(key, None)
        if prices is None or step >= prices.until:
            prices = _prices(batch, cost, step, accept_rate)
        self._known[key] = prices
        if len(self._known) > _BATCHES:
            del self._known[next(iter(self._known))]
        return prices


def _key(batch: Batch) -> tuple[object, ...]:
    """The facts of a batch that decide its prices.

    The key of a plain decode step is short, since such a step leaves little time. The ids of the
    first and last request suffice: requests are in the order of admission, so when one takes
    another's place the first or last one changes.
    """
    entries = batch.entries
    decodes = batch.num_run_tokens == len(entries) > 0
    if decodes and all(entry.samples and not entry.draft_slots.size for entry in entries):
        return len(entries), entries[0].request.request_id, entries[-1].request.request_id
    details = [
        (entry.request.request_id, entry.run_len, entry.samples, entry.draft_slots.size)
        for entry in entries
    ]
    return (*details, batch.tail is None)


def _prices(batch: Batch, cost: StepCost, step: int, accept_rate: float) -> Prices:
    entries = batch.entries
    width = sum(entry.samples for entry in entries)
    longest = max((entry.end for entry in entries), default=0)
    nodes = np.arange(1 + sum(entry.draft_slots.size for entry in entries))
    every = _PRICE_EVERY if nodes.size > 1 else _PRICE_EVERY_PLAIN
    if not width:
        return Prices(step + every, 0, longest, 0.0, 0.0, np.zeros(1), np.zeros(len(entries)))
    alone = np.array([width])
    decode_ms = float(cost.forward_ms(alone, alone, longest)[0])
    with_nodes_N1 = cost.forward_ms(batch.num_run_tokens + nodes, width + nodes, longest)
    temperature = sum(e.request.params.temperature for e in entries if e.samples) / width
    token_ms_B = np.full(len(entries), decode_ms / width)
    if batch.tail is not None and nodes.size > 1 and len(entries) > 1:
        one = np.array([1])
        alone_ms = float(cost.forward_ms(one, one, longest)[0])
        remaining_B = [batch.tail.remaining(entry.request) for entry in entries]
        last_alone_B = last_alone(remaining_B, accept_rate)
        replaced = batch.tail.replaced
        token_ms_B *= replaced
        token_ms_B += (1.0 - replaced) * token_ms(decode_ms, alone_ms, width, last_alone_B)
        every = max(_PRICE_EVERY_TAIL, len(entries) // 4)
    extra_ms_N = with_nodes_N1[1:] - with_nodes_N1[0]
    cheapest_ms = float((extra_ms_N / nodes[1:]).min(initial=np.inf))
    return Prices(
        until=step + every,
        width=width,
        longest_context=longest,
        temperature=temperature,
        decode_ms=decode_ms,
        with_nodes_N1=with_nodes_N1,
        token_ms_B=token_ms_B,
        cheapest_ms=cheapest_ms,
    )
