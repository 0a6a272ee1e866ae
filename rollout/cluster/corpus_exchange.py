"""Tells each replica the tokens that the others committed."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rollout.cluster.replica import Replica, then
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.engine.draft_corpus import CorpusDelta
from rollout.engine.engine import RolloutEngine
from rollout.errors import InvalidInputError


class CorpusExchange:
    """Every so often asks each replica what it committed, and tells all.

    One round at a time: while a replica is slow to answer or to learn, nothing is asked, and what
    waits is bounded in the replicas. Deltas are handed on as they came; each replica passes over
    its own.
    """

    def __init__(self, replicas: ReplicaManager, seconds: float, max_bytes: int) -> None:
        self._replicas = replicas
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._has_corpus = False  # the replicas' workers
        self._begun_at = time.monotonic()
        self._taking: list[Future[CorpusDelta]] = []
        self._learning: list[Future[None]] = []
        replicas.on_join(self._begin_to_share)

    def poll(self) -> None:
        """Go on with the round as far as answers have come. Never waits."""
        under_way: list[Future[Any]] = [*self._taking, *self._learning]
        if not all(future.done() for future in under_way):
            return
        if self._taking:
            deltas = [delta for delta in map(_value, self._taking) if delta is not None]
            deltas = [delta for delta in deltas if delta.rollouts_B.size]
            self._taking = []
            if deltas:
                shared = self._replicas.share(deltas)
                self._learning = [
                    *self._replicas.call_all(RolloutEngine.learn_corpus_deltas, shared).values()
                ]
            return
        self._learning = []
        has_others = self._has_corpus and len(self._replicas.joined) > 1
        if has_others and time.monotonic() - self._begun_at >= self._seconds:
            self._begun_at = time.monotonic()
            self._taking = [*self._replicas.call_all(RolloutEngine.take_corpus_delta).values()]

    def finish(self) -> None:
        """A whole round: when it returns, all replicas were told what was committed before."""
        while self._taking or self._learning:
            self.poll()
            self._replicas.poll(WAIT_SECONDS)
        self._begun_at = float("-inf")
        self.poll()
        while self._taking or self._learning:
            self._replicas.poll(WAIT_SECONDS)
            self.poll()

    def _begin_to_share(self, replica: Replica) -> Future[None]:
        def note(answer: Future[Any]) -> None:
            with suppress(InvalidInputError):  # its worker has no corpus, or shares it already
                answer.result()
                self._has_corpus = True

        return then(replica.call(RolloutEngine.share_corpus, self._max_bytes), note)


def _value(future: Future[CorpusDelta]) -> CorpusDelta | None:
    """The replica's answer; None if it died."""
    return future.result() if future.exception() is None else None
