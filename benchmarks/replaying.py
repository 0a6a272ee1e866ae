"""Replays recorded rollouts through a drafter.

The recorded response is what the target sampled: the longest path of the draft tree that spells it
is accepted, then one token more. With sample-and-match verification that is the true accept length
at any temperature.

Shape legend: B open sequences, N tokens or draft nodes of a call, flat, R responses of the trace.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from harness.traces import Trace
from numpy.typing import NDArray

from ngram_native import Corpus

_WRONG = -1


@dataclass(kw_only=True, slots=True)
class Drafts:
    """Draft trees of a batch, flat, without the roots.

    Entry b owns nodes ``[offsets_B1[b], offsets_B1[b + 1])``. Within an entry the root (the last
    committed token) is tree node 0 and node j, from 0, is tree node j + 1; parents come before
    children.
    """

    offsets_B1: NDArray[np.int64]
    tokens_N: NDArray[np.int32]
    parents_N: NDArray[np.int32]


class Drafter(Protocol):
    """Anything that drafts for many sequences at once. The replay calls it in this order:

    For each step of training `set_weight_version`; then, until the step's sequences are done,
    `open` for those that begin, `propose` and `insert` for all that are open, `close` for those
    that ended.
    """

    name: str

    def set_weight_version(self, version: int) -> None:
        """Tokens from now on come from another policy."""

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        """A sequence begins after ``prompt``; the samples of one prompt share ``group``."""

    def propose(self, ids_B: NDArray[np.int64], budget: int) -> Drafts:
        """A tree of at most ``budget`` nodes for each of the open sequences."""

    def insert(
        self, ids_B: NDArray[np.int64], tokens_N: NDArray[np.int32], offsets_B1: NDArray[np.int64]
    ) -> None:
        """Sequence b went on with ``tokens_N[offsets_B1[b]:offsets_B1[b + 1]]``, at least one."""

    def close(self, sequence_id: int) -> None:
        """The sequence ended."""


class CorpusDrafter:
    """The n-gram corpus; nodes less likely than ``floor`` to be accepted are not drafted."""

    def __init__(self, floor: float = 0.0) -> None:
        self.name = f"corpus, floor {floor:g}" if floor > 0 else "corpus"
        self.corpus = Corpus(max_bytes=256 << 20)
        self._floor = floor

    def set_weight_version(self, version: int) -> None:
        self.corpus.set_weight_version(version)

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self.corpus.open(sequence_id, group, prompt)

    def propose(self, ids_B: NDArray[np.int64], budget: int) -> Drafts:
        budgets_B = np.full(len(ids_B), budget, np.int32)
        proposal = self.corpus.propose(ids_B, budgets_B, self._floor)
        return Drafts(
            offsets_B1=proposal.offsets_B1,
            tokens_N=proposal.tokens_N,
            parents_N=proposal.parents_N,
        )

    def insert(
        self, ids_B: NDArray[np.int64], tokens_N: NDArray[np.int32], offsets_B1: NDArray[np.int64]
    ) -> None:
        self.corpus.extend(ids_B, tokens_N, offsets_B1)

    def close(self, sequence_id: int) -> None:
        self.corpus.close(sequence_id)


@dataclass(kw_only=True, slots=True)
class Replay:
    """The outcome of a replay, by response."""

    drafter: str
    forwards_R: NDArray[np.int64]
    drafted_R: NDArray[np.int64]
    emitted_R: NDArray[np.int64]
    propose_seconds: float  # CPU time of the calls
    insert_seconds: float

    @property
    def accept_length(self) -> float:
        """Tokens emitted per forward and sequence, the target's own included."""
        return float(self.emitted_R.sum() / self.forwards_R.sum())

    @property
    def drafted(self) -> float:
        """Draft nodes per forward and sequence."""
        return float(self.drafted_R.sum() / self.forwards_R.sum())

    @property
    def propose_cost(self) -> float:
        """Microseconds per sequence and forward."""
        return float(self.propose_seconds / self.forwards_R.sum() * 1e6)

    @property
    def insert_cost(self) -> float:
        """Microseconds per token."""
        return float(self.insert_seconds / self.emitted_R.sum() * 1e6)


def match_tree(
    tokens: list[int], parents: list[int], begin: int, end: int, to_come: list[int], at: int
) -> list[int]:
    """The agreement of the path to each of the nodes [begin, end) with ``to_come[at:]``.

    The node's depth when all of it agrees, else ``_WRONG``. The root is first.
    """
    matched = [0]
    for n in range(begin, end):
        depth = matched[parents[n]]
        agrees = depth >= 0 and tokens[n : n + 1] == to_come[at + depth : at + depth + 1]
        matched.append(depth + 1 if agrees else _WRONG)
    return matched


def replay(trace: Trace, drafter: Drafter, *, budget: int, active: int) -> Replay:
    """Run the responses of each step together, at most ``active`` at a time.

    The trace's prompt index is the group, its response index the sequence id.
    """
    count = len(trace.responses)
    to_come = [response.tolist() for response in trace.responses]
    emitted, forwards, drafted = [0] * count, [0] * count, [0] * count
    propose_seconds = insert_seconds = 0.0
    clock = time.process_time

    for version, step in enumerate(trace.steps):
        drafter.set_weight_version(version)
        waiting = step[::-1]
        running: list[int] = []
        while waiting or running:
            while waiting and len(running) < active:
                response = waiting.pop()
                prompt = int(trace.prompt_of_R[response])
                drafter.open(response, prompt, trace.prompts[prompt])
                running.append(response)
            ids_B = np.array(running, np.int64)
            start = clock()
            drafts = drafter.propose(ids_B, budget)
            propose_seconds += clock() - start

            tokens, parents = drafts.tokens_N.tolist(), drafts.parents_N.tolist()
            ends = drafts.offsets_B1.tolist()
            fresh: list[int] = []
            fresh_ends = [0]
            for b, response in enumerate(running):
                begin, end = ends[b], ends[b + 1]
                at = emitted[response]
                matched = match_tree(tokens, parents, begin, end, to_come[response], at)
                emitted[response] = min(at + max(matched) + 1, len(to_come[response]))
                forwards[response] += 1
                drafted[response] += end - begin
                fresh += to_come[response][at : emitted[response]]
                fresh_ends.append(len(fresh))

            tokens_N, offsets_B1 = np.array(fresh, np.int32), np.array(fresh_ends, np.int64)
            start = clock()
            drafter.insert(ids_B, tokens_N, offsets_B1)
            insert_seconds += clock() - start
            still = []
            for response in running:
                if emitted[response] < len(to_come[response]):
                    still.append(response)
                else:
                    drafter.close(response)
            running = still

    return Replay(
        drafter=drafter.name,
        forwards_R=np.array(forwards),
        drafted_R=np.array(drafted),
        emitted_R=np.array(emitted),
        propose_seconds=propose_seconds,
        insert_seconds=insert_seconds,
    )
