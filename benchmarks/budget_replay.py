"""The budget's choice of nodes on recorded rollouts, where forwards cost what a roofline says.

Replayed are the choice of nodes and what the corpus is told of the verified ones. Not replayed: the
gate, the hysteresis that keeps drafts from turning on and off, the corrections learned of the
corpus's probabilities, and the time that drafting takes, which has no price here.

Shape legend: B sequences of a call, N draft nodes of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from harness.rows import Row, row
from harness.traces import Trace
from numpy.typing import NDArray
from replaying import CorpusDrafter, Drafts, replay

from ngram_native import Proposal
from spec_workers.budget.node_choice import choose_nodes, falling

NODES = 16
"""Most draft nodes per request and step."""

ACTIVE = 64
"""Sequences that run together."""

_MIN_PROBABILITY = 0.02  # the choice is to leave nodes out, not this


def roofline(query_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Time of a GPU's decode step by its query tokens, roots included: up to 170 rows take as long
    as reading the weights, more as long as the arithmetic; attention, sampling and the like add to
    each row."""
    return np.maximum(1.0, query_tokens / 170) + 0.15 * query_tokens / 170


Pick = Callable[[Proposal], NDArray[np.int64]]
"""How many first nodes of each tree are verified, (B,)."""


def pick_all(proposal: Proposal) -> NDArray[np.int64]:
    return np.diff(proposal.offsets_B1)


def pick_by_worth(proposal: Proposal) -> NDArray[np.int64]:
    """The number of nodes that the budget chooses of each tree."""
    size = len(proposal.offsets_B1) - 1
    values_N = falling(proposal.probabilities_N.astype(np.float64), proposal.offsets_B1)
    cost_N1 = roofline(size + np.arange(len(values_N) + 1))
    token_ms_B = np.full(size, float(cost_N1[0]) / size)
    return choose_nodes(values_N, proposal.offsets_B1, token_ms_B, cost_N1).counts_B


class PricedDrafter(CorpusDrafter):
    """Hands out the first nodes of the corpus's trees, as many as ``pick`` says; adds up prices."""

    def __init__(self, pick: Pick, floor: float = 0.0) -> None:
        super().__init__(floor)
        self._pick = pick
        self._verified_B = np.empty(0, np.int32)
        self.price_of_step: list[float] = []  # by RL step
        self.num_steps = 0
        self.num_steps_without_drafts = 0

    @property
    def price(self) -> float:
        return sum(self.price_of_step)

    def set_weight_version(self, version: int) -> None:
        super().set_weight_version(version)
        self.price_of_step.append(0.0)

    def propose(self, ids_B: NDArray[np.int64], budget: int) -> Drafts:
        proposal = self.ask(ids_B, budget)
        counts_B = self._pick(proposal)
        num_nodes = int(counts_B.sum())
        self.price_of_step[-1] += float(roofline(np.array(len(ids_B) + num_nodes)))
        self.num_steps += 1
        self.num_steps_without_drafts += num_nodes == 0
        self._verified_B = counts_B.astype(np.int32)
        return first_nodes(proposal, counts_B)

    def insert(
        self, ids_B: NDArray[np.int64], tokens_N: NDArray[np.int32], offsets_B1: NDArray[np.int64]
    ) -> None:
        self.corpus.extend(ids_B, tokens_N, offsets_B1, self._verified_B)


def first_nodes(proposal: Proposal, counts_B: NDArray[np.int64]) -> Drafts:
    """The first ``counts_B[b]`` nodes of each tree; a parent comes before its children."""
    sizes_B = np.diff(proposal.offsets_B1)
    node_N = np.arange(sizes_B.sum()) - np.repeat(proposal.offsets_B1[:-1], sizes_B)
    kept_N = node_N < np.repeat(counts_B, sizes_B)
    return Drafts(
        offsets_B1=np.concatenate([[0], np.cumsum(counts_B)]).astype(np.int64),
        tokens_N=proposal.tokens_N[kept_N],
        parents_N=proposal.parents_N[kept_N],
    )


def replay_rows(trace: Trace, bar: float | None) -> Iterator[Row]:
    """``bar``: least speedup over plain decoding of the same trace under the same prices."""
    plain, chosen, fixed = (
        PricedDrafter(pick, _MIN_PROBABILITY) for pick in (pick_all, pick_by_worth, pick_all)
    )
    replay(trace, plain, budget=0, active=ACTIVE)
    result = replay(trace, chosen, budget=NODES, active=ACTIVE)
    replay(trace, fixed, budget=8, active=ACTIVE)
    worst = (np.array(plain.price_of_step) / np.array(chosen.price_of_step)).min()
    idle = chosen.num_steps_without_drafts / chosen.num_steps
    label = f"replay of {trace.name}"
    yield row(f"{label}: plain", plain.price, "decode steps")
    yield row(f"{label}: accept length", result.accept_length, "tokens")
    yield row(f"{label}: verified", result.drafted, "nodes/request")
    yield row(f"{label}: steps without drafts", idle, "share")
    yield row(f"{label}: worst RL step", worst, "x")
    yield row(f"{label}: 8 nodes per request", plain.price / fixed.price, "x")
    yield row(f"{label}: speedup", plain.price / chosen.price, "x", bar)
