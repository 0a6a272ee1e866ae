"""A cluster's corpora: external ones on all replicas, and what each commits told to the others."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rollout.cluster.members import WAIT_SECONDS, Members
from rollout.cluster.replica import Replica
from rollout.corpus_delta import CorpusDelta
from rollout.draft_corpus import ExternalCorpus, ExternalState, check_name
from rollout.errors import InvalidInputError

log = logging.getLogger(__name__)


class CorpusExchange:
    """Every so often asks each replica what it committed, and tells all.

    One round at a time: while a replica is slow to answer or to learn, nothing is asked, and what
    waits is bounded in the replicas. Deltas are handed on as they came; each replica passes over
    its own.
    """

    def __init__(self, members: Members, seconds: float, max_bytes: int) -> None:
        self._members = members
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._has_corpus = False  # the replicas' workers
        self._begun_at = time.monotonic()
        self._taking: list[Future[CorpusDelta]] = []
        self._learning: list[Future[None]] = []
        self.rounds = 0
        self.exchanged_bytes = 0  # taken; each is sent to all replicas but one
        members.on_join(self._begin_to_share)

    def attend(self) -> None:
        """Go on with the round as far as answers have come. Never waits."""
        under_way: list[Future[Any]] = [*self._taking, *self._learning]
        if not all(future.done() for future in under_way):
            return
        if self._taking:
            deltas = [delta for delta in map(_value, self._taking) if delta is not None]
            deltas = [delta for delta in deltas if delta.rollouts_B.size]
            self._taking = []
            if deltas:
                shared = self._members.share(deltas)
                self._learning = self._call_all("learn_corpus_deltas", shared)
                self.exchanged_bytes += sum(delta.num_bytes for delta in deltas)
            return
        self._learning = []
        has_others = self._has_corpus and len(self._members.joined) > 1
        if has_others and time.monotonic() - self._begun_at >= self._seconds:
            self._begun_at = time.monotonic()
            self.rounds += 1
            self._taking = self._call_all("take_corpus_delta")

    def finish(self) -> None:
        """A whole round: when it returns, all replicas were told what was committed before."""
        while self._taking or self._learning:
            self.attend()
            self._members.attend(WAIT_SECONDS)
        self._begun_at = float("-inf")
        self.attend()
        while self._taking or self._learning:
            self._members.attend(WAIT_SECONDS)
            self.attend()

    def _call_all(self, method: str, *args: Any) -> list[Future[Any]]:
        return [each.call(method, *args) for each in self._members.joined.values()]

    def _begin_to_share(self, replica: Replica) -> Future[None]:
        begun: Future[None] = Future()

        def note(answer: Future[Any]) -> None:
            error = answer.exception()
            self._has_corpus |= error is None  # the second time is refused
            if error is None or isinstance(error, InvalidInputError):  # its worker has no corpus
                begun.set_result(None)
            else:
                begun.set_exception(error)

        replica.call("share_corpus", self._max_bytes).add_done_callback(note)
        return begun


class CorpusCalls:
    """A part of RolloutCluster; its calls mean what those of `RolloutEngine` do.

    An external corpus is on every replica or on none: one that a replica cannot load is removed
    from all, and listed as failed. A replica that starts loads those that there are, and gives up
    configured ones that were removed.
    """

    members: Members
    _sources: dict[str, Mapping[str, Any]]  # of external corpora: arguments by name
    _removed: set[str]  # of those configured, which replicas have as they start
    _failed: dict[str, ExternalCorpus]  # removed from all

    def add_external_corpus(
        self,
        name: str | None = None,
        *,
        documents: Sequence[str] | None = None,
        token_chunks: Sequence[Sequence[int]] | None = None,
        file_path: str | os.PathLike[str] | None = None,
        wait: bool = False,
    ) -> str:
        """Each replica loads it; a file under the same path. Documents are kept for those that
        start later, until it is removed."""
        if name is None:
            name = uuid.uuid4().hex
        check_name("name", name)
        given = {"documents": documents, "token_chunks": token_chunks, "file_path": file_path}
        source = {
            key: self.members.share(value) for key, value in given.items() if value is not None
        }
        self._failed.pop(name, None)
        self._add(name, source)
        while wait:
            found = {each.name: each for each in self.external_corpora()}
            own = found.get(name)  # None while no replica lives
            if own is not None and own.state is ExternalState.PUBLISHED:
                break
            if own is not None and own.state is ExternalState.FAILED:
                del self._failed[name]
                raise InvalidInputError("name", name, f"could not be loaded: {own.error}")
            self.members.attend(WAIT_SECONDS)
        return name

    def remove_external_corpus(self, name: str) -> None:
        if self._failed.pop(name, None) is not None:
            return
        self.members.on_all("remove_external_corpus", name)
        self._forget(name)

    def external_corpora(self) -> list[ExternalCorpus]:
        """Published where it is on all replicas; its progress is the slowest one's."""
        by_replica = self.members.on_all("external_corpora")
        self._complete(by_replica)
        by_name: dict[str, dict[str, ExternalCorpus]] = {}
        for replica, corpora in by_replica.items():
            for each in corpora:
                by_name.setdefault(each.name, {})[replica] = each
        for name, on in by_name.items():
            for replica, each in on.items():
                if each.state is ExternalState.FAILED and name in self._sources:
                    self._fail(name, replica, each)
        merged = {name: _merged(list(on.values()), len(by_replica)) for name, on in by_name.items()}
        merged |= self._failed
        return [merged[name] for name in sorted(merged)]

    def save_corpus(self, path: str | os.PathLike[str]) -> None:
        """One replica's: of its own rollouts alone, where replicas do not share theirs."""
        self.members.on_one("save_corpus", os.fspath(path))

    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        """On every replica, under the same path."""
        self.members.on_all("load_corpus", os.fspath(path))

    def learned(self) -> dict[str, Any]:
        """One replica's."""
        return self.members.on_one("learned")

    def _add(self, name: str, source: Mapping[str, Any]) -> None:
        answers = {
            each: each.call("add_external_corpus", name, **source)
            for each in self.members.joined.values()
        }
        errors = {each: answer.exception() for each, answer in answers.items()}
        refused = [error for error in errors.values() if isinstance(error, InvalidInputError)]
        if refused:
            for each, error in errors.items():
                if error is None:
                    each.call("remove_external_corpus", name).exception()
            raise refused[0]
        self._sources[name] = source
        self._removed.discard(name)
        self.members.tell_newcomers("add_external_corpus", name, **source)

    def _fail(self, name: str, replica: str, found: ExternalCorpus) -> None:
        log.error("external corpus %s is removed from all replicas: %s", name, found.error)
        for each in self.members.joined.values():
            each.call("remove_external_corpus", name).exception()
        self._forget(name)
        self._failed[name] = replace(found, error=f"on {replica}: {found.error}")

    def _bring_corpora(self, replica: Replica) -> None:
        """A joiner: they load while it runs."""
        for name in self._removed:
            replica.call("remove_external_corpus", name)
        for name, source in self._sources.items():
            replica.call("add_external_corpus", name, **source)

    def _complete(self, by_replica: Mapping[str, list[ExternalCorpus]]) -> None:
        """What a replica could not begin to load as it started it cannot now, or does."""
        for replica, corpora in by_replica.items():
            for name in self._sources.keys() - {each.name for each in corpora}:
                living = self.members.joined.get(replica)
                if living is None:
                    continue
                error = living.call("add_external_corpus", name, **self._sources[name]).exception()
                if isinstance(error, InvalidInputError):
                    self._fail(name, replica, ExternalCorpus(
                        name=name, state=ExternalState.FAILED, num_tokens=0, num_bytes=0,
                        progress=None, error=str(error),
                    ))  # fmt: skip

    def _forget(self, name: str) -> None:
        if self._sources.pop(name, None) is None:
            self._removed.add(name)
        self.members.tell_newcomers("remove_external_corpus", name)


def _merged(on: list[ExternalCorpus], num_replicas: int) -> ExternalCorpus:
    if len(on) == num_replicas and all(each.state is on[0].state for each in on):
        slowest = min(on, key=lambda each: each.progress or 0.0)
        return slowest
    behind = [each for each in on if each.state is not ExternalState.PUBLISHED]
    slowest = min(behind or on, key=lambda each: each.progress or 0.0)
    state = slowest.state if slowest.state is ExternalState.FAILED else ExternalState.LOADING
    return replace(slowest, state=state)


def _value(future: Future[CorpusDelta]) -> CorpusDelta | None:
    """None of a replica that died."""
    return future.result() if future.exception() is None else None
