"""The corpus with a part of the budget, replayed where forwards have a price.

The budget's own are the choice of nodes, and telling the corpus how many nodes were verified. Not
replayed: the gate, the hysteresis that keeps drafts from turning on and off, the corrections
learned of the corpus's probabilities, and the time that drafting takes, which has no price here.

Shape legend: B sequences of a call, N draft nodes of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from drafters.drafter import Drafts
from numpy.typing import NDArray
from traces import Trace

from ngram_native import Corpus, Proposal
from rollout.scheduler.length_forecast import LengthForecast
from spec_workers.budget.prices import choose_nodes, falling

Cost = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Time of a step by its query tokens, roots included."""


def roofline(query_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of a GPU, in decode steps: up to 170 rows as long as reading the weights takes, then as long
    as the arithmetic; and what attention, sampling and the like add to each row."""
    return np.maximum(1.0, query_tokens / 170) + 0.15 * query_tokens / 170


FIRST_LIMIT = 4096
"""Tokens a response of the first RL step is taken to be limited to."""


@dataclass(kw_only=True, slots=True)
class Running:
    """What is known of the sequences of a call when their nodes are picked."""

    remaining_B: NDArray[np.float64]  # tokens each is expected to emit yet
    ends: bool  # nobody waits for a seat


Pick = Callable[[Proposal, Running, Cost], NDArray[np.int64]]
"""How many first nodes of each tree are verified, (B,)."""


def pick_all(proposal: Proposal, running: Running, cost: Cost) -> NDArray[np.int64]:
    return np.diff(proposal.offsets_B1)


def pick_by_probability(proposal: Proposal, running: Running, cost: Cost) -> NDArray[np.int64]:
    """A token is worth the same wherever it is emitted."""
    size = len(running.remaining_B)
    values_N = falling(proposal.probabilities_N.astype(np.float64), proposal.offsets_B1)
    cost_N1 = cost(size + np.arange(len(values_N) + 1))
    token_cost = float(cost_N1[0]) / size
    return choose_nodes(values_N, proposal.offsets_B1, token_cost, cost_N1).counts_B


class PricedDrafter:
    """Hands out the first nodes of the corpus's trees that ``pick`` chose, and adds up the price.

    The forecast of lengths learns what a scheduler's would: the responses that ended. A recording
    does not tell its limit of new tokens: that of an RL step is taken to be the longest response of
    the steps before it, of the first ``FIRST_LIMIT``, so that no length is known ahead of its time.
    """

    name = "priced"

    def __init__(
        self, trace: Trace, pick: Pick, *, cost: Cost = roofline, min_probability: float = 0.0
    ) -> None:
        self._corpus = Corpus(max_bytes=256 << 20)
        self._forecast = LengthForecast()
        self._trace = trace
        self._pick = pick
        self._cost = cost
        self._min_probability = min_probability
        self._limit = FIRST_LIMIT
        self._longest = 0  # of the responses that ended
        self._version = 0
        self._unopened = 0  # responses of the RL step
        self._emitted: dict[int, int] = {}  # of the open sequences
        self._verified_B = np.empty(0, np.int32)
        self.price_of_step: list[float] = []  # of RL steps
        self.num_steps = 0
        self.num_steps_without_drafts = 0

    @property
    def price(self) -> float:
        return sum(self.price_of_step)

    def set_weight_version(self, version: int) -> None:
        self._corpus.set_weight_version(version)
        self._limit = self._longest or FIRST_LIMIT
        self._unopened = len(self._trace.steps[version])
        self.price_of_step.append(0.0)

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self._corpus.open(sequence_id, group, prompt)
        self._emitted[sequence_id] = 0
        self._unopened -= 1

    def propose(self, sequence_ids_B: NDArray[np.int64], budget: int) -> Drafts:
        size = len(sequence_ids_B)
        budgets_B = np.full(size, budget, np.int32)
        proposal = self._corpus.propose(sequence_ids_B, budgets_B, self._min_probability)
        counts_B = self._pick(proposal, self._running(sequence_ids_B), self._cost)
        num_nodes = int(counts_B.sum())
        self.price_of_step[-1] += float(self._cost(np.array(size + num_nodes)))
        self.num_steps += 1
        self.num_steps_without_drafts += num_nodes == 0
        self._verified_B = counts_B.astype(np.int32)
        return first_nodes(proposal, counts_B)

    def insert(
        self,
        sequence_ids_B: NDArray[np.int64],
        tokens_N: NDArray[np.int32],
        offsets_B1: NDArray[np.int64],
    ) -> None:
        self._corpus.extend(sequence_ids_B, tokens_N, offsets_B1, self._verified_B)
        for sequence_id, count in zip(sequence_ids_B.tolist(), np.diff(offsets_B1), strict=True):
            self._emitted[sequence_id] += int(count)

    def close(self, sequence_id: int) -> None:
        self._corpus.close(sequence_id)
        length = self._emitted.pop(sequence_id)
        self._forecast.observe(self._group(sequence_id), length)
        self._longest = max(self._longest, length)

    def _running(self, sequence_ids_B: NDArray[np.int64]) -> Running:
        remaining = []
        for sequence_id in sequence_ids_B.tolist():
            emitted = self._emitted[sequence_id]
            room = max(1, self._limit - emitted)
            remaining.append(self._forecast.remaining(self._group(sequence_id), emitted, room))
        return Running(remaining_B=np.array(remaining), ends=self._unopened == 0)

    def _group(self, sequence_id: int) -> int:
        return int(self._trace.prompt_of_R[sequence_id])


def first_nodes(proposal: Proposal, counts_B: NDArray[np.int64]) -> Drafts:
    """Of each tree its first ``counts_B[b]`` nodes; a parent comes before its children."""
    sizes_B = np.diff(proposal.offsets_B1)
    node_N = np.arange(sizes_B.sum()) - np.repeat(proposal.offsets_B1[:-1], sizes_B)
    kept_N = node_N < np.repeat(counts_B, sizes_B)
    return Drafts(
        offsets_B1=np.concatenate([[0], np.cumsum(counts_B)]).astype(np.int64),
        tokens_N=proposal.tokens_N[kept_N],
        parents_N=proposal.parents_N[kept_N],
    )
