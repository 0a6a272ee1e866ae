"""A cluster's corpora: the same external ones on every replica, published together."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rollout.cluster.replica import Replica, ReplicaDiedError
from rollout.cluster.replica_corpus_sync import (
    POLL_SECONDS,
    ClusterCorpus,
    CorporaOfAll,
    ReplicaCorpusSync,
)
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState, Publishing, check_name
from rollout.errors import InvalidInputError
from rollout.validation import checked_member

log = logging.getLogger(__name__)


class ClusterCorpora:
    """External corpora of a cluster: each replica loads at its own pace, and one is published when
    all replicas that have joined are ready.

    So while any replica drafts from a corpus, all that run requests have it in memory, and each
    begins between two of its steps. A corpus that a replica cannot load or publish is removed from
    all, and listed as failed. A replica that starts publishes what the others have before it joins.
    `Corpora` documents the calls.
    """

    def __init__(self, replicas: ReplicaManager) -> None:
        self._replicas = replicas
        self._corpora: dict[str, ClusterCorpus] = {}
        self._removed: set[str] = set()  # of files' that replicas have as they start
        self._file: str | None = None  # loaded on all
        self._has_begun = False  # to load the configured ones
        self._looking: dict[Replica, Future[list[ExternalCorpus]]] = {}
        self._looked_at = float("-inf")
        self._sync = ReplicaCorpusSync(replicas, self._of_all)

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
        """Have each replica load a corpus; a file under the same path. Replicas that start later
        load it too, until it is removed. If one replica refuses it, none keeps it."""
        if name is None:
            name = uuid.uuid4().hex
        check_name("name", name)
        publishing = checked_member(publish, "publish", Publishing)
        given = {"documents": documents, "token_chunks": token_chunks, "file_path": file_path}
        source = {
            key: self._replicas.share(value) for key, value in given.items() if value is not None
        }
        self._begin_configured()
        if name in self._corpora and not self._corpora[name].has_failed:
            raise InvalidInputError("name", name, "is taken: remove that corpus, or choose another")
        self._add(name, source, publishing)
        if wait:
            self.wait(name)
        return name

    def wait(self, name: str) -> None:
        """Wait until a corpus is published, or ready if it is published on request.

        Raises InvalidInputError where it could not be loaded; its name is free again.
        """
        while name in self._corpora and not self._corpora[name].is_final:
            self.poll()
            self._replicas.poll(WAIT_SECONDS)
        corpus = self._corpora.get(name)
        if corpus is not None and corpus.has_failed:
            del self._corpora[name]
            raise InvalidInputError("name", name, f"could not be loaded: {corpus.seen.error}")

    def remove_external_corpus(self, name: str) -> None:
        self._begin_configured()
        self._take_refusals()
        if name not in self._corpora or not self._corpora[name].has_failed:
            self._replicas.on_all("remove_external_corpus", name)
            self._removed.add(name)
        self._corpora.pop(name, None)
        self._change()

    def publish_external_corpus(self, name: str) -> None:
        found = {each.name: each for each in self.external_corpora()}
        if name not in found:
            known = ", ".join(found) or "none"
            raise InvalidInputError("name", name, f"is unknown; there are {known}")
        if found[name].state is ExternalState.LOADING:
            raise InvalidInputError("name", name, "is loading; wait until it is ready")
        if found[name].state is ExternalState.READY:
            self._publish(self._corpora[name])
            self._wait_until_published()
        corpus = self._corpora.get(name)
        if corpus is not None and corpus.has_failed:
            raise InvalidInputError("name", name, f"has failed: {corpus.seen.error}")

    def external_corpora(self) -> list[ExternalCorpus]:
        """All corpora by name, each with the least state of all replicas and the least progress."""
        self._begin_configured()
        by_replica = self._replicas.on_all("external_corpora")
        self._advance(by_replica)
        self._wait_until_published()
        self._fail_those_of_some(by_replica)
        return self.known(by_replica)

    def known(self, by_replica: Mapping[str, Sequence[ExternalCorpus]]) -> list[ExternalCorpus]:
        """All corpora by name, as last looked at; ``by_replica`` adds corpora of loaded files."""
        found = {each.name: each for on in by_replica.values() for each in on}
        found = {name: each for name, each in found.items() if name not in self._removed}
        found |= {name: each.seen for name, each in self._corpora.items()}
        return [found[name] for name in sorted(found)]

    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        """Load a file on every replica, also on those that start later, under the same path."""
        self._replicas.on_all("load_corpus", os.fspath(path))
        self._file = os.fspath(path)
        self._corpora = {  # what was published is gone, or is the file's now
            name: each
            for name, each in self._corpora.items()
            if each.has_failed or each.publish_calls is None
        }
        self._removed.clear()
        self._change()

    def poll(self) -> None:
        """Go on as far as answers have come. Waits only to add configured corpora."""
        self._begin_configured()
        self._note_published()
        self._take_refusals()
        if all(each.is_final for each in self._corpora.values()):
            return
        if not self._looking:
            if time.monotonic() - self._looked_at >= POLL_SECONDS:
                self._looking = self._replicas.call_all("external_corpora")
        elif all(future.done() for future in self._looking.values()):
            looking, self._looking = self._looking, {}
            self._looked_at = time.monotonic()
            seen = {
                each.name: future.result()
                for each, future in looking.items()
                if future.exception() is None
            }
            if self._replicas.joined.keys() <= seen.keys():  # else one has joined meanwhile
                self._advance(seen)

    def _of_all(self) -> CorporaOfAll:
        corpora = {name: each for name, each in self._corpora.items() if not each.has_failed}
        return CorporaOfAll(
            file=self._file,
            corpora=corpora,
            published={name for name, each in corpora.items() if each.publish_calls is not None},
            removed=set(self._removed),
        )

    def _begin_configured(self) -> None:
        """Add the corpora of ``spec.external_corpora``; does nothing the second time.

        The first step does it, and every call but `load_corpus`: they replace a file's corpora.
        """
        if self._has_begun:
            return
        self._has_begun = True
        for name, path in self._sync.configured.items():
            self._replicas.call_all("remove_external_corpus", name)
            try:
                self._add(name, {"file_path": path}, Publishing.WHEN_READY)
            except InvalidInputError as error:
                failed = _blank(name, ExternalState.FAILED, str(error))
                self._corpora[name] = ClusterCorpus(name, {}, Publishing.WHEN_READY, failed)

    def _add(self, name: str, source: Mapping[str, Any], publishing: Publishing) -> None:
        answers = self._replicas.call_all(
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
        self._corpora[name] = ClusterCorpus(name, source, publishing, seen)
        self._removed.discard(name)
        self._change()

    def _advance(self, by_replica: Mapping[str, Sequence[ExternalCorpus]]) -> None:
        """Update each corpus by what the replicas that have joined report of it."""
        self._take_refusals()
        for name, corpus in list(self._corpora.items()):
            if corpus.has_failed:
                continue
            on = {
                replica: each
                for replica, corpora in by_replica.items()
                for each in corpora
                if each.name == name
            }
            failed = next((r for r, each in on.items() if each.state is ExternalState.FAILED), None)
            if failed is not None:
                self._fail(corpus, f"on {failed}: {on[failed].error}")
            elif corpus.publish_calls is None and on:
                corpus.seen = _slowest(list(on.values()), len(by_replica))
                is_ready = corpus.seen.state is ExternalState.READY
                if is_ready and corpus.publishing is Publishing.WHEN_READY:
                    self._publish(corpus)

    def _publish(self, corpus: ClusterCorpus) -> None:
        """Publish on all replicas. A replica that joins later has published it before it joins."""
        corpus.publish_calls = self._replicas.call_all("publish_external_corpus", corpus.name)
        self._replicas.repeat_joins()

    def _wait_until_published(self) -> None:
        self._note_published()
        while any(each.publish_calls and not each.is_final for each in self._corpora.values()):
            self._replicas.poll(WAIT_SECONDS)
            self._note_published()

    def _note_published(self) -> None:
        """Mark corpora as published once every live replica that was asked has answered."""
        for corpus in list(self._corpora.values()):
            publish_calls = corpus.publish_calls
            if publish_calls is None or corpus.is_final:
                continue
            if not all(answer.done() for answer in publish_calls.values()):
                continue
            errors = {each.name: answer.exception() for each, answer in publish_calls.items()}
            for replica, error in errors.items():
                if error is not None and not isinstance(error, ReplicaDiedError):
                    self._fail(corpus, f"on {replica}: {error}")
                    break
            else:
                corpus.seen = replace(corpus.seen, state=ExternalState.PUBLISHED, progress=1.0)

    def _fail(self, corpus: ClusterCorpus, reason: str) -> None:
        log.error("external corpus %s is removed from all replicas: %s", corpus.name, reason)
        self._replicas.call_all("remove_external_corpus", corpus.name)
        self._removed.add(corpus.name)
        corpus.seen = _blank(corpus.name, ExternalState.FAILED, reason)
        self._change()

    def _fail_those_of_some(self, by_replica: Mapping[str, Sequence[ExternalCorpus]]) -> None:
        """Fail a file's corpora that a replica which started later could not load."""
        names = {replica: {each.name for each in on} for replica, on in by_replica.items()}
        for name in set().union(*names.values()) - (self._corpora.keys() | self._removed):
            without = [replica for replica, there in names.items() if name not in there]
            if without:
                corpus = ClusterCorpus(
                    name, {}, Publishing.WHEN_READY, _blank(name, ExternalState.PUBLISHED)
                )
                self._corpora[name] = corpus
                self._fail(corpus, f"{without[0]} could not load the file that holds it")

    def _change(self) -> None:
        """Begin looks and joins anew: what they know of the corpora is out of date."""
        self._looking = {}
        self._replicas.repeat_joins()

    def _take_refusals(self) -> None:
        for corpus, reason in self._sync.refusals():
            if self._corpora.get(corpus.name) is corpus and not corpus.has_failed:
                self._fail(corpus, reason)


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
