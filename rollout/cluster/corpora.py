"""A cluster's external corpora: each replica takes every change by itself, at its own pace."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollout.cluster.replica import Replica
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState, Publishing, check_name
from rollout.engine.engine import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.parallel.time_limit import on_thread

log = logging.getLogger(__name__)

_STATES = (
    ExternalState.FAILED,
    ExternalState.LOADING,
    ExternalState.READY,
    ExternalState.PUBLISHED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A call that every replica makes, also one that starts later."""

    number: int
    method: Callable[..., Any]
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str | None:
        """The corpus; None for `load_corpus`, which replaces all."""
        return self.arguments.get("name")

    def call(self, replica: Replica) -> Future[Any]:
        return replica.call(self.method, **self.arguments)


class ClusterCorpora:
    """External corpora of a cluster. A corpus decides speed alone, never a token, so replicas need
    not have the same ones at one moment: `external_corpora` says which lack one.

    A replica that starts makes the same changes before it joins. `Corpora` documents the calls.
    """

    def __init__(self, replicas: ReplicaManager) -> None:
        self._replicas = replicas
        self._changes: list[_Change] = []
        self._count = 0  # of all changes, forgotten ones too
        self._sent: dict[str, tuple[Replica, int]] = {}  # the last change of each that starts
        replicas.on_join(self._bring)

    def add_external_corpus(
        self,
        name: str | None = None,
        *,
        documents: Sequence[str] | None = None,
        token_chunks: Sequence[Sequence[int]] | None = None,
        file_path: str | os.PathLike[str] | None = None,
        publish: Publishing | str = Publishing.WHEN_READY,
        wait: bool = False,
    ) -> str:
        """Have each replica load a corpus; a file under the same path. If one refuses it, or if
        ``wait`` shows that one cannot load it, none keeps it."""
        if name is None:
            name = uuid.uuid4().hex
        check_name("name", name)
        given = {"documents": documents, "token_chunks": token_chunks, "file_path": file_path}
        source = {
            key: self._replicas.share(value) for key, value in given.items() if value is not None
        }
        self._replicas.await_one()  # whoever refuses it says so now
        method, arguments = (
            RolloutEngine.add_external_corpus,
            {"name": name, "publish": publish, **source},
        )
        self._replicas.on_all(
            method,
            undo=lambda replica: replica.call(RolloutEngine.remove_external_corpus, name),
            **arguments,
        )
        self._changes = [
            each for each in self._changes if (each.method, each.name) != (method, name)
        ]
        self._record(method, arguments)
        if wait:
            self._wait(name)
        return name

    def remove_external_corpus(self, name: str) -> None:
        self._require_known(name)
        calls = self._replicas.call_all(RolloutEngine.remove_external_corpus, name)
        _, failed = self._replicas.outcomes(calls)
        for error in failed.values():
            if not isinstance(error, InvalidInputError):  # a replica that lacks it refuses
                raise error
        self._changes = [each for each in self._changes if each.name != name]
        self._record(RolloutEngine.remove_external_corpus, {"name": name})

    def publish_external_corpus(self, name: str) -> None:
        self._require_known(name)
        self._replicas.on_all(RolloutEngine.publish_external_corpus, name=name)
        for each in self._changes.copy():
            if each.name == name and each.arguments.get("publish") == Publishing.ON_REQUEST:
                self._changes.remove(each)
                # A replica that starts may have it already, to be published on request.
                self._record(RolloutEngine.remove_external_corpus, {"name": name})
                self._record(each.method, {**each.arguments, "publish": Publishing.WHEN_READY})

    def external_corpora(self) -> list[ExternalCorpus]:
        """All corpora by name, each as on the replica that is least far with it."""
        self._replicas.await_one()
        return merged(self._replicas.on_all(RolloutEngine.external_corpora))

    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        """Load a file on every replica, also on those that start later, under the same path."""
        path = os.fspath(path)
        self._replicas.on_all(RolloutEngine.load_corpus, path=path)
        self._changes.clear()
        self._record(RolloutEngine.load_corpus, {"path": path})

    def _record(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._count += 1
        self._changes.append(_Change(number=self._count, method=method, arguments=arguments))
        self._replicas.repeat_joins()

    def _wait(self, name: str) -> None:
        while True:
            own = {each.name: each for each in self.external_corpora()}.get(name)
            if own is None:
                raise InvalidInputError("name", name, "could not be loaded: no replica has it")
            if own.state is ExternalState.FAILED:
                self.remove_external_corpus(name)
                raise InvalidInputError("name", name, f"could not be loaded: {own.error}")
            if own.state is not ExternalState.LOADING:
                return
            self._replicas.poll(WAIT_SECONDS)

    def _require_known(self, name: str) -> None:
        known = [each.name for each in self.external_corpora()]
        if name not in known:
            raise InvalidInputError(
                "name", name, f"is unknown; there are {', '.join(known) or 'none'}"
            )

    def _bring(self, replica: Replica) -> Future[None]:
        """A joiner, done when the replica has made the changes; see `ReplicaManager.on_join`."""
        before, sent = self._sent.get(replica.name, (None, 0))
        sent = sent if before is replica else 0
        self._sent[replica.name] = replica, self._count
        answers = [(each, each.call(replica)) for each in self._changes if each.number > sent]
        return on_thread(f"corpora of {replica.name}", partial(_await, replica.name, answers))


def merged(by_replica: Mapping[str, Iterable[ExternalCorpus]]) -> list[ExternalCorpus]:
    """All corpora by name, each as on the replica that is least far with it; ``error`` names the
    replicas that failed or lack it."""
    found: dict[str, dict[str, ExternalCorpus]] = {}
    for replica, corpora in by_replica.items():
        for corpus in corpora:
            found.setdefault(corpus.name, {})[replica] = corpus
    return [_merged(found[name], by_replica.keys() - found[name].keys()) for name in sorted(found)]


def _merged(on: Mapping[str, ExternalCorpus], lacking: Iterable[str]) -> ExternalCorpus:
    least = min(on.values(), key=lambda each: (_STATES.index(each.state), each.progress or 0.0))
    problems = [f"on {name}: {each.error}" for name, each in sorted(on.items()) if each.error]
    problems += [f"{name} lacks it" for name in sorted(lacking)]
    return replace(least, error="; ".join(problems) or None)


def _await(name: str, answers: Sequence[tuple[_Change, Future[Any]]]) -> None:
    for change, answer in answers:
        try:
            answer.result()
        except (InvalidInputError, OSError, MemoryError) as error:
            # What is not there need not be removed.
            if change.method != RolloutEngine.remove_external_corpus:
                log.warning("%s starts without a change of corpora: %s", name, error)
