"""Brings the external corpora of the others to a replica that starts without any."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollout.cluster.replica import Replica
from rollout.cluster.replica_manager import ReplicaManager
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState, Publishing
from rollout.errors import InvalidInputError
from rollout.parallel.time_limit import on_thread

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""Seconds between two looks at corpora that load."""


@dataclass(slots=True, eq=False)
class ClusterCorpus:
    """An external corpus that every replica is to have, unless it has failed."""

    name: str
    source: Mapping[str, Any]  # arguments of `add_external_corpus`, shared among the hosts
    publishing: Publishing
    seen: ExternalCorpus  # of all replicas together, when they were last looked at
    # By the replicas that had joined when it was published.
    publish_calls: dict[Replica, Future[None]] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it has failed: it was removed from all replicas, and is listed with the
        reason."""
        return self.seen.state is ExternalState.FAILED

    @property
    def is_final(self) -> bool:
        """Whether its state changes no more by itself."""
        waits = self.publishing is Publishing.ON_REQUEST and self.seen.state is ExternalState.READY
        is_at_rest = self.seen.state in (ExternalState.PUBLISHED, ExternalState.FAILED)
        return is_at_rest or (waits and self.publish_calls is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorporaOfAll:
    """The external corpora that every replica has at one moment: one that joins needs the same."""

    file: str | None  # loaded on all
    corpora: Mapping[str, ClusterCorpus]  # none that failed
    published: Set[str]
    removed: Set[str]  # from the file, or from a replica's configuration


@dataclass(slots=True, eq=False)
class _Brought:
    """The corpora a replica was given before it joined. Its thread's, one at a time."""

    replica: Replica
    file: str | None = None
    corpora: dict[str, ClusterCorpus] = field(default_factory=dict)


class ReplicaCorpusSync:
    """Brings each replica that starts what the others have, on a thread of its own.

    Configured corpora are taken from the replicas, so that the cluster adds them to all.
    """

    def __init__(self, replicas: ReplicaManager, of_all: Callable[[], CorporaOfAll]) -> None:
        self.configured: Mapping[str, str] = {}
        """The files of configured corpora by name, the same on each replica."""
        self._of_all = of_all
        self._brought: dict[str, _Brought] = {}  # by the name of the replica
        self._refusals: queue.SimpleQueue[tuple[ClusterCorpus, str]] = queue.SimpleQueue()
        replicas.on_join(self._bring)

    def refusals(self) -> Iterator[tuple[ClusterCorpus, str]]:
        """The corpora that replicas could not take since the last call, and why."""
        while not self._refusals.empty():
            yield self._refusals.get()

    def _bring(self, replica: Replica) -> Future[None]:
        """A joiner, done when the replica has published what is published; see
        `ReplicaManager.on_join`."""
        brought = self._brought.get(replica.name)
        if brought is None or brought.replica is not replica:
            brought = self._brought[replica.name] = _Brought(replica)
        # First, since any look at an engine's corpora begins to load its configured ones.
        taken = replica.call("take_configured_corpora")
        bring_all = partial(self._bring_all, brought, taken, self._of_all())
        return on_thread(f"corpora of {replica.name}", bring_all)

    # On the thread

    def _bring_all(
        self, brought: _Brought, taken: Future[dict[str, str]], of_all: CorporaOfAll
    ) -> None:
        replica = brought.replica
        self.configured = taken.result() or self.configured
        if of_all.file is not None and brought.file != of_all.file:
            brought.file = of_all.file
            try:
                replica.call("load_corpus", of_all.file).result()
            except (InvalidInputError, OSError, MemoryError) as error:
                log.warning(
                    "%s starts without the corpus in %s: %s", replica.name, of_all.file, error
                )
        if not of_all.corpora and not of_all.removed:
            return
        there = {each.name for each in replica.call("external_corpora").result()}
        current = {
            name for name, each in of_all.corpora.items() if brought.corpora.get(name) is each
        }
        for name in there & (of_all.removed | of_all.corpora.keys() - current):
            replica.call("remove_external_corpus", name).result()
        for name, corpus in of_all.corpora.items():
            if name in current and name in there:
                continue
            brought.corpora[name] = corpus
            try:
                replica.call(
                    "add_external_corpus", name, publish=Publishing.ON_REQUEST, **corpus.source
                ).result()
            except InvalidInputError as error:
                self._refuse(corpus, replica, str(error))
        for name in of_all.published:
            self._publish(replica, of_all.corpora[name])

    def _publish(self, replica: Replica, corpus: ClusterCorpus) -> None:
        while True:
            corpora = {each.name: each for each in replica.call("external_corpora").result()}
            own = corpora.get(corpus.name)
            if own is None:
                return  # it was refused
            if own.state is not ExternalState.LOADING:
                break
            time.sleep(POLL_SECONDS)
        try:
            replica.call("publish_external_corpus", corpus.name).result()
        except InvalidInputError as error:
            self._refuse(corpus, replica, own.error or str(error))

    def _refuse(self, corpus: ClusterCorpus, replica: Replica, reason: str) -> None:
        self._refusals.put((corpus, f"on {replica.name}: {reason}"))
