"""Committed tokens that other engines' corpora have not received yet."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollout.engine.draft_corpus import CorpusDelta
from rollout.types import Request

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Ended:
    """The part of an ended request that is needed: not its logprobs nor other extras."""

    request_id: int
    group: int
    prompt_len: int
    partial_len: int
    tokens: NDArray[np.int32]
    weight_versions: NDArray[np.int64]

    @classmethod
    def of(cls, request: Request) -> Self:
        return cls(
            request.request_id,
            request.group,
            request.prompt_len,
            request.partial_len,
            np.array(request.tokens, dtype=np.int32),
            np.array(request.weight_versions, dtype=np.int64),
        )


@dataclass(slots=True)
class _Sent:
    """A rollout, and how much of it was handed out."""

    request: Request | _Ended
    emitted: int = 0  # tokens that deltas had
    ended: bool = False

    @property
    def waiting_bytes(self) -> int:
        request = self.request
        waiting = len(request.tokens) - request.prompt_len - self.emitted
        context = 0 if self.emitted else request.prompt_len
        return _TOKEN_BYTES * (waiting + context) if waiting else 0


class CorpusOutbox:
    """Follows requests and hands out what they committed, each token once.

    It goes by what the requests hold, so nothing is copied while they run. Bounded: what waits
    is at most ``max_bytes`` of tokens; beyond that whole rollouts are dropped, the oldest first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.sender = secrets.randbits(63)
        self._num_taken = 0
        self._rollouts: dict[int, _Sent] = {}  # by request id, the oldest first
        self._dropped: set[int] = set()  # requests still running
        self._ended_bytes = 0  # that wait, of rollouts that have ended
        self.shared_tokens = 0
        self.dropped_rollouts = 0

    def follow(self, requests: Iterable[Request]) -> None:
        """Hand out what these requests emit, from now on."""
        for request in requests:
            request_id = request.request_id
            if request_id not in self._rollouts and request_id not in self._dropped:
                self._rollouts[request_id] = _Sent(request)

    def leave(self, request: Request) -> None:
        """The request has ended; its tokens are still handed out."""
        request_id = request.request_id
        self._dropped.discard(request_id)
        sent = self._rollouts.get(request_id)
        if sent is None:
            return
        sent.request, sent.ended = _Ended.of(request), True
        self._ended_bytes += sent.waiting_bytes
        if not sent.emitted and not sent.waiting_bytes:
            del self._rollouts[request_id]
        elif self._ended_bytes > self._max_bytes:
            self._make_room()

    def take(self) -> CorpusDelta:
        """Everything that waits to be handed out; without chunks if nothing does."""
        self._make_room()
        delta = _delta(self.sender, self._num_taken, self._rollouts.values())
        self._num_taken += 1
        self.shared_tokens += delta.num_tokens
        self._ended_bytes = 0
        self._rollouts = {id_: each for id_, each in self._rollouts.items() if not each.ended}
        for sent in self._rollouts.values():
            sent.emitted = len(sent.request.tokens) - sent.request.prompt_len
        return delta

    def _make_room(self) -> None:
        waiting = {id_: sent.waiting_bytes for id_, sent in self._rollouts.items()}
        excess = sum(waiting.values()) - self._max_bytes
        for request_id, num_bytes in waiting.items():
            if excess <= 0:
                return
            if not num_bytes:
                continue
            excess -= num_bytes
            self.dropped_rollouts += 1
            if self._rollouts.pop(request_id).ended:
                self._ended_bytes -= num_bytes
            else:
                self._dropped.add(request_id)


def _delta(sender: int, number: int, rollouts: Iterable[_Sent]) -> CorpusDelta:
    contexts: dict[tuple[int, int], int] = {}  # (group, request id if resubmitted) -> index
    context_tokens: list[int] = []
    context_offsets = [0]
    chunks: list[tuple[int, int, int, int, bool]] = []
    tokens: list[int] = []
    offsets = [0]
    for sent in rollouts:
        request, waiting = sent.request, list(_chunks(sent))
        context = -1
        if waiting and not sent.emitted:
            key = (request.group, request.request_id if request.partial_len else -1)
            if key not in contexts:
                contexts[key] = len(contexts)
                context_tokens.extend(request.tokens[: request.prompt_len])
                context_offsets.append(len(context_tokens))
            context = contexts[key]
        if sent.ended and not waiting:
            waiting = [(sent.emitted, sent.emitted, request.weight_versions[-1])]
        for index, (start, end, version) in enumerate(waiting):
            ends = sent.ended and index == len(waiting) - 1
            own = context if start == 0 else -1
            chunks.append((request.request_id, own, start, version, ends))
            tokens.extend(request.tokens[request.prompt_len + start : request.prompt_len + end])
            offsets.append(len(tokens))
    ids, own_contexts, starts, versions, ends_B = zip(*chunks, strict=True) if chunks else [()] * 5
    return CorpusDelta(
        sender=sender,
        number=number,
        groups_C=np.array([group for group, _ in contexts], dtype=np.uint64),
        context_offsets_C1=np.array(context_offsets, dtype=np.int64),
        context_tokens_M=np.array(context_tokens, dtype=np.int32),
        rollouts_B=np.array(ids, dtype=np.int64),
        contexts_B=np.array(own_contexts, dtype=np.int32),
        starts_B=np.array(starts, dtype=np.int32),
        versions_B=np.array(versions, dtype=np.int64),
        ends_B=np.array(ends_B, dtype=np.bool_),
        offsets_B1=np.array(offsets, dtype=np.int64),
        tokens_N=np.array(tokens, dtype=np.int32),
    )


def _chunks(sent: _Sent) -> Iterator[tuple[int, int, int]]:
    """(start, end, version) of what waits, in emitted tokens; one chunk for each policy."""
    start = sent.emitted
    for version, run in groupby(sent.request.weight_versions[start:]):
        end = start + sum(1 for _ in run)
        yield start, end, version
        start = end
