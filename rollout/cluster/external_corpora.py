"""A cluster's external corpora: the same ones on every replica, published together."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.cluster.replica import Replica, ReplicaDiedError
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState, Publishing
from rollout.errors import InvalidInputError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
"""Between two looks at what loads."""


@dataclass(slots=True, eq=False)
class _Corpus:
    """One that every replica is to have."""

    name: str
    source: Mapping[str, Any]  # arguments of `add_external_corpus`
    publishing: Publishing
    seen: ExternalCorpus  # of all replicas, when they were last looked at
    # By the replicas that had joined when it was published.
    publish_calls: dict[Replica, Future[None]] | None = None

    @property
    def is_final(self) -> bool:
        """Nothing happens to it unasked any more."""
        waits = self.publishing is Publishing.ON_REQUEST and self.seen.state is ExternalState.READY
        return self.seen.state is ExternalState.PUBLISHED or (waits and self.publish_calls is None)


@dataclass(slots=True, eq=False)
class _Brought:
    """The corpora a replica was given before it joined. Its thread's, one at a time."""

    replica: Replica
    file: str | None = None
    corpora: dict[str, _Corpus] = field(default_factory=dict)


class ExternalCorpora:
    """Loaded by each replica at its own pace; published when it is ready on all that have joined.

    So while any replica drafts from one, all that run requests have it in memory, and each begins
    between two of its steps. One that a replica cannot load or publish is removed from all, and
    listed as failed. A replica that starts has published all those that are before it joins. The
    replicas' configured ones are taken from them and added here.
    """

    def __init__(self, members: ReplicaManager) -> None:
        self._members = members
        self._corpora: dict[str, _Corpus] = {}
        self._failed: dict[str, ExternalCorpus] = {}  # removed from all
        self._removed: set[str] = set()  # of files' that replicas have as they start
        self._file: str | None = None  # loaded on all
        self._configured: dict[str, str] = {}  # name -> file, until `begin_configured`
        self._has_begun = False
        self._looking: dict[Replica, Future[list[ExternalCorpus]]] = {}
        self._looked_at = float("-inf")
        self._brought: dict[str, _Brought] = {}  # by the name of the replica
        # What newcomers could not take, by their threads: corpus, replica, reason.
        self._refusals: queue.SimpleQueue[tuple[_Corpus, str, str]] = queue.SimpleQueue()
        members.on_join(self._bring)

    def begin_configured(self) -> None:
        """Add those of ``spec.external_corpora``; the second time there are none left.

        The first step does it, and every call but `note_loaded`: they replace a file's.
        """
        if self._has_begun:
            return
        self._has_begun = True
        for name, path in self._configured.items():
            self._call_all("remove_external_corpus", name)
            try:
                self._add(name, {"file_path": path}, Publishing.WHEN_READY)
            except InvalidInputError as error:
                self._failed[name] = _blank(name, ExternalState.FAILED, str(error))

    def add(self, name: str, source: Mapping[str, Any], publishing: Publishing) -> None:
        """Raises InvalidInputError where a replica does; it is on none then."""
        self.begin_configured()
        if name in self._corpora:
            raise InvalidInputError("name", name, "is taken: remove that corpus, or choose another")
        self._add(name, source, publishing)

    def wait(self, name: str) -> None:
        """Until it is published, or ready where that is on request.

        Raises InvalidInputError where it could not be loaded; its name is free again.
        """
        while name in self._corpora and not self._corpora[name].is_final:
            self.poll()
            self._members.poll(WAIT_SECONDS)
        if (failed := self._failed.pop(name, None)) is not None:
            raise InvalidInputError("name", name, f"could not be loaded: {failed.error}")

    def remove(self, name: str) -> None:
        """When it returns no replica drafts from it. Raises InvalidInputError if unknown."""
        self.begin_configured()
        self._take_refusals()
        if self._failed.pop(name, None) is None:
            self._members.on_all("remove_external_corpus", name)
            self._forget(name)

    def publish(self, name: str) -> None:
        """See `RolloutEngine.publish_external_corpus`."""
        found = {each.name: each for each in self.listed()}
        if name not in found:
            known = ", ".join(found) or "none"
            raise InvalidInputError("name", name, f"is unknown; there are {known}")
        if found[name].state is ExternalState.LOADING:
            raise InvalidInputError("name", name, "is loading; wait until it is ready")
        if found[name].state is ExternalState.READY:
            self._tell(self._corpora[name])
            self._wait_until_told()
        if name in self._failed:
            raise InvalidInputError("name", name, f"has failed: {self._failed[name].error}")

    def listed(self) -> list[ExternalCorpus]:
        """All of them by name; those that wait for nothing but being ready are published now."""
        self.begin_configured()
        by_replica = self._members.on_all("external_corpora")
        self._advance(by_replica)
        self._wait_until_told()
        self._fail_those_of_some(by_replica)
        return self.known(by_replica)

    def known(self, by_replica: Mapping[str, Sequence[ExternalCorpus]]) -> list[ExternalCorpus]:
        """All of them by name, as last looked at; ``by_replica`` tells of those of files."""
        found = {each.name: each for on in by_replica.values() for each in on}
        found = {name: each for name, each in found.items() if name not in self._removed}
        found |= {name: each.seen for name, each in self._corpora.items()} | self._failed
        return [found[name] for name in sorted(found)]

    def poll(self) -> None:
        """Go on as far as answers have come. Waits for none but those of configured ones."""
        self.begin_configured()
        self._note_published()
        self._take_refusals()
        if all(each.is_final for each in self._corpora.values()):
            return
        if not self._looking:
            if time.monotonic() - self._looked_at >= _POLL_SECONDS:
                self._looking = self._call_all("external_corpora")
        elif all(future.done() for future in self._looking.values()):
            looking, self._looking = self._looking, {}
            self._looked_at = time.monotonic()
            seen = {
                each.name: future.result()
                for each, future in looking.items()
                if future.exception() is None
            }
            if self._members.joined.keys() <= seen.keys():  # else one has joined meanwhile
                self._advance(seen)

    def note_loaded(self, path: str) -> None:
        """All replicas loaded a corpus file: what was published is gone, or is the file's now."""
        self._file = path
        self._corpora = {
            name: each for name, each in self._corpora.items() if not each.publish_calls
        }
        self._removed.clear()
        self._change()

    def _add(self, name: str, source: Mapping[str, Any], publishing: Publishing) -> None:
        answers = self._call_all(
            "add_external_corpus", name, publish=Publishing.ON_REQUEST, **source
        )
        errors = {each: answer.exception() for each, answer in answers.items()}
        refused = [
            error
            for error in errors.values()
            if error is not None and not isinstance(error, ReplicaDiedError)
        ]
        if refused:
            for each, error in errors.items():
                if error is None:
                    each.call("remove_external_corpus", name)
            raise refused[0]
        seen = _blank(name, ExternalState.LOADING)
        self._corpora[name] = _Corpus(name, source, publishing, seen)
        self._failed.pop(name, None)
        self._removed.discard(name)
        self._change()

    def _advance(self, by_replica: Mapping[str, Sequence[ExternalCorpus]]) -> None:
        """By what each replica that has joined says of its own."""
        self._take_refusals()
        for name, corpus in list(self._corpora.items()):
            on = {
                replica: each
                for replica, corpora in by_replica.items()
                for each in corpora
                if each.name == name
            }
            failed = next((r for r, each in on.items() if each.state is ExternalState.FAILED), None)
            if failed is not None:
                self._fail(name, f"on {failed}: {on[failed].error}")
            elif corpus.publish_calls is None and on:
                corpus.seen = _slowest(list(on.values()), len(by_replica))
                is_ready = corpus.seen.state is ExternalState.READY
                if is_ready and corpus.publishing is Publishing.WHEN_READY:
                    self._tell(corpus)

    def _tell(self, corpus: _Corpus) -> None:
        """From now on who joins has published it before."""
        corpus.publish_calls = self._call_all("publish_external_corpus", corpus.name)
        self._members.repeat_joins()

    def _wait_until_told(self) -> None:
        self._note_published()
        while any(each.publish_calls and not each.is_final for each in self._corpora.values()):
            self._members.poll(WAIT_SECONDS)
            self._note_published()

    def _note_published(self) -> None:
        """Published: when all that were told, and live, have answered."""
        for name, corpus in list(self._corpora.items()):
            publish_calls = corpus.publish_calls
            if publish_calls is None or corpus.is_final:
                continue
            if not all(answer.done() for answer in publish_calls.values()):
                continue
            errors = {each.name: answer.exception() for each, answer in publish_calls.items()}
            for replica, error in errors.items():
                if error is not None and not isinstance(error, ReplicaDiedError):
                    self._fail(name, f"on {replica}: {error}")
                    break
            else:
                corpus.seen = replace(corpus.seen, state=ExternalState.PUBLISHED, progress=1.0)

    def _fail(self, name: str, reason: str) -> None:
        log.error("external corpus %s is removed from all replicas: %s", name, reason)
        self._call_all("remove_external_corpus", name)
        self._forget(name)
        self._failed[name] = _blank(name, ExternalState.FAILED, reason)

    def _fail_those_of_some(self, by_replica: Mapping[str, Sequence[ExternalCorpus]]) -> None:
        """A file's are on all, unless one that started later could not load it."""
        names = {replica: {each.name for each in on} for replica, on in by_replica.items()}
        known = self._corpora.keys() | self._failed.keys() | self._removed
        for name in set().union(*names.values()) - known:
            without = [replica for replica, there in names.items() if name not in there]
            if without:
                self._fail(name, f"{without[0]} could not load the file that holds it")

    def _forget(self, name: str) -> None:
        self._corpora.pop(name, None)
        self._removed.add(name)
        self._change()

    def _change(self) -> None:
        """Note a change: corpora that are being looked at, or brought, are out of date."""
        self._looking = {}
        self._members.repeat_joins()

    def _call_all(self, method: str, *args: Any, **kwargs: Any) -> dict[Replica, Future[Any]]:
        joined = self._members.joined.values()
        return {each: each.call(method, *args, **kwargs) for each in joined}

    def _take_refusals(self) -> None:
        while not self._refusals.empty():
            corpus, replica, reason = self._refusals.get()
            if self._corpora.get(corpus.name) is corpus:
                self._fail(corpus.name, f"on {replica}: {reason}")

    # A newcomer, on a thread of its own

    def _bring(self, replica: Replica) -> Future[None]:
        """Bring a joiner what is published; see `ReplicaManager.on_join`.

        Done when the joiner has published it too.
        """
        done: Future[None] = Future()
        brought = self._brought.get(replica.name)
        if brought is None or brought.replica is not replica:
            brought = self._brought[replica.name] = _Brought(replica)
        published = {name for name, each in self._corpora.items() if each.publish_calls is not None}
        # First of all: what looks at an engine begins to load those it is configured with.
        configured = replica.call("take_configured_corpora")
        args = (brought, configured, self._file, dict(self._corpora), published, set(self._removed))

        def run() -> None:
            try:
                self._bring_all(*args)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, name=f"corpora of {replica.name}", daemon=True).start()
        return done

    def _bring_all(
        self,
        brought: _Brought,
        taken: Future[dict[str, str]],
        file: str | None,
        corpora: Mapping[str, _Corpus],
        published: set[str],
        removed: set[str],
    ) -> None:
        replica = brought.replica
        configured = taken.result()
        if configured and not self._has_begun:  # the same ones on each
            self._configured = configured
        if file is not None and brought.file != file:
            brought.file = file
            try:
                replica.call("load_corpus", file).result()
            except (InvalidInputError, OSError, MemoryError) as error:
                log.warning("%s starts without the corpus in %s: %s", replica.name, file, error)
        if not corpora and not removed:
            return
        there = {each.name for each in replica.call("external_corpora").result()}
        kept = {name for name, each in corpora.items() if brought.corpora.get(name) is each}
        for name in there & (removed | corpora.keys() - kept):
            replica.call("remove_external_corpus", name).result()
        for name, corpus in corpora.items():
            if name in kept and name in there:
                continue
            brought.corpora[name] = corpus
            try:
                replica.call(
                    "add_external_corpus", name, publish=Publishing.ON_REQUEST, **corpus.source
                ).result()
            except InvalidInputError as error:
                self._refusals.put((corpus, replica.name, str(error)))
        for name in published:
            self._publish_on(replica, corpora[name])

    def _publish_on(self, replica: Replica, corpus: _Corpus) -> None:
        while True:
            corpora = {each.name: each for each in replica.call("external_corpora").result()}
            own = corpora.get(corpus.name)
            if own is None:
                return  # it was refused
            if own.state is not ExternalState.LOADING:
                break
            time.sleep(_POLL_SECONDS)
        try:
            replica.call("publish_external_corpus", corpus.name).result()
        except InvalidInputError as error:
            self._refusals.put((corpus, replica.name, own.error or str(error)))


def _slowest(on: Sequence[ExternalCorpus], num_replicas: int) -> ExternalCorpus:
    """The state of all replicas together: ready where it is everywhere, else loading."""
    loading = [each for each in on if each.state is ExternalState.LOADING]
    slowest = min(loading or on, key=lambda each: each.progress or 0.0)
    is_ready = not loading and len(on) == num_replicas
    return replace(slowest, state=ExternalState.READY if is_ready else ExternalState.LOADING)


def _blank(name: str, state: ExternalState, error: str | None = None) -> ExternalCorpus:
    return ExternalCorpus(
        name=name, state=state, num_tokens=0, num_bytes=0, progress=None, error=error
    )
