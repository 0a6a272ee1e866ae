"""Prices of a batch's draft nodes, in ms of plain decoding, and which of them are worth verifying.

Legend: B sampling entries, N draft nodes; K ranks, 1 for the last request to end; S lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.types import Batch
from spec_workers.budget.step_cost import StepCost

_LEAST = np.finfo(np.float64).tiny
"""Where thousands are equal and all but the last cost nothing, closeness to it rounds to 0."""

_MAX_EXACT = 64
_BY_RANK, _BY_LENGTH = 48, 16  # lengths worked out for larger batches
_TOWARDS_LONGEST = 3  # power of even steps in rank: there the worth changes most


def token_worth(
    remaining_B: NDArray[np.float64], decode_ms_B: NDArray[np.float64], ends: bool
) -> NDArray[np.float64]:
    """The milliseconds that one more token of each request saves; their sum is a decode step's.

    While others wait for the seats every token brings the end equally near. When none do, a request
    that ends one step sooner spares the difference between decoding with it and without it, when
    its turn comes to be the last of k: little for the first to end, whole steps for the last. Which
    turn that will be is uncertain; lifetimes are taken for exponential with the expected
    means, so that i outlives j with probability m_i / (m_i + m_j).

    Above 64 requests this is worked out for 64 lengths, each against all requests, and in between
    it is interpolated as a power of the length: about a hundredth of the worth goes astray.

    Args:
        remaining_B: tokens each request is expected to emit yet, > 0.
        decode_ms_B: time of a plain step of 1, 2, ..., B requests, non-decreasing.
        ends: nobody waits: the step ends with these.
    """
    size = remaining_B.size
    share = decode_ms_B[-1] / size
    if not ends or size == 1:
        return np.full(size, share)
    saved_K = np.diff(decode_ms_B, prepend=0.0)
    if size <= _MAX_EXACT:
        worth_B = _saved(remaining_B, remaining_B, saved_K)
    else:
        remaining_S = _some_lengths(remaining_B)
        worth_S = _saved(remaining_S, remaining_B, saved_K)
        worth_B = np.exp(np.interp(np.log(remaining_B), np.log(remaining_S), np.log(worth_S)))
    return worth_B * (decode_ms_B[-1] / worth_B.sum())


def _saved(
    remaining_S: NDArray[np.float64],
    remaining_B: NDArray[np.float64],
    saved_K: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The milliseconds a request of each length saves when its turn comes to end, > 0: O(S B)."""
    outlives_SB = remaining_S[:, None] / (remaining_S[:, None] + remaining_B)
    survivors_S = (1.0 - outlives_SB).sum(1) - 0.5  # who outlives it; itself it does not
    variance_S = (outlives_SB * (1.0 - outlives_SB)).sum(1) - 0.25
    rank_K = np.arange(saved_K.size)
    closeness_SK = np.exp(-((rank_K - survivors_S[:, None]) ** 2) / (2 * variance_S[:, None] + 0.1))
    return closeness_SK @ saved_K / closeness_SK.sum(1) + _LEAST


def _some_lengths(remaining_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ascending, from the shortest to the longest: where most are, and with no wide gap.

    Equal ones count once: many may be capped alike.
    """
    descending = np.unique(remaining_B)[::-1]
    steps = np.linspace(0.0, 1.0, _BY_RANK) ** _TOWARDS_LONGEST
    by_rank = descending[np.round((descending.size - 1) * steps).astype(np.intp)]
    return np.union1d(by_rank, np.geomspace(descending[-1], descending[0], _BY_LENGTH))


_PRICE_EVERY = 16
"""Steps of an unchanged batch that are priced alike."""

_BATCHES = 4
"""Whose prices are kept: parts of a batch may take turns."""


@dataclass(slots=True)
class Prices:
    """The prices of one batch, in milliseconds."""

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


class Choice(NamedTuple):
    counts_B: NDArray[np.int64]  # so many first nodes of each entry
    worth: float  # milliseconds of plain decoding that those are expected to spare
    cost: float  # milliseconds of the step with them


def choose_nodes(
    values_N: NDArray[np.floating],
    offsets_B1: NDArray[np.int64],
    worth_B: NDArray[np.float64],
    cost_ms: NDArray[np.float64],
    base_worth: float,
) -> Choice:
    """The nodes that make the step progress fastest.

    Nodes are taken by what they are expected to spare, most first; of all prefixes of that order
    the one with the most milliseconds spared per millisecond spent. Within an entry values do not
    grow, so an ancestor is always taken before its descendants.

    Args:
        values_N: probability that each node is accepted; within an entry non-increasing.
        offsets_B1: entry b owns nodes [offsets[b], offsets[b + 1]).
        worth_B: what one emitted token of each entry spares, in milliseconds of plain decoding.
        cost_ms: ``(N + 1,)``, the step with k draft nodes.
        base_worth: what the step spares without drafts.
    """
    sizes_B = np.diff(offsets_B1)
    entry_N = np.repeat(np.arange(sizes_B.size), sizes_B)
    spared_N = values_N * worth_B[entry_N]
    order_N = np.argsort(-spared_N, kind="stable")  # ties: as they come, an ancestor first
    worth = np.empty(values_N.size + 1)
    worth[0] = 0.0
    np.cumsum(spared_N[order_N], out=worth[1:])
    best = int(np.argmax((base_worth + worth) / cost_ms))
    counts_B = np.bincount(entry_N[order_N[:best]], minlength=sizes_B.size)
    return Choice(counts_B, float(worth[best]), float(cost_ms[best]))


def falling(values_N: NDArray[np.floating], offsets_B1: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each value lowered to the least one before it within its entry. Values are in [0, 1]."""
    sizes_B = np.diff(offsets_B1)
    # Entry b lives in [-2b, -2b + 1]: what an entry before it left is above all of its own.
    shift_N = 2.0 * np.repeat(np.arange(sizes_B.size), sizes_B)
    return np.minimum.accumulate(values_N - shift_N) + shift_N
