"""The n-gram corpus as the engine sees it: with the loads of its external corpora, and its file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ngram_native import Corpus
from rollout.engine.draft_corpus import (
    CorpusDelta,
    ExternalCorpus,
    ExternalState,
    Publishing,
)
from rollout.engine.durable_files import whole_file
from rollout.errors import IntegrityError, InvalidInputError
from rollout.types import Request
from spec_workers.corpus.external_loader import ExternalLoader
from spec_workers.corpus.feed import CorpusFeed
from spec_workers.corpus.inbox import CorpusInbox
from spec_workers.corpus.options import CorpusOptions
from spec_workers.corpus.outbox import CorpusOutbox

_OPTION_OF = {
    "max_bytes": "corpus_bytes",
    "max_external_bytes": "max_external_bytes",
    "max_tokens": "max_external_tokens",
}
_OF_A_LIMIT = re.compile(r"(documents|max_\w+)=[<\d]|the file was saved with ")
_AT_REST = (ExternalState.PUBLISHED, ExternalState.FAILED)

_LEARNED_PER_STEP = 16_384
"""Tokens of other engines that a step takes in: some milliseconds."""


class NgramCorpus:
    """See `rollout.engine.draft_corpus.DraftCorpus`; to the worker, the ``corpus`` itself."""

    def __init__(self, vocab_size: int, options: CorpusOptions) -> None:
        """``vocab_size``: of the target.

        Raises InvalidInputError, naming the option; OSError for a corpus that cannot be read.
        """
        options.check_corpus_files()
        self._options = options
        try:
            self.corpus = Corpus(
                max_bytes=options.corpus_bytes,
                max_external_bytes=options.max_external_bytes,
                vocabulary=f"{vocab_size} tokens",
                vocab_size=vocab_size,
            )
        except ValueError as error:
            parameter = str(error).partition("=")[0]
            if parameter not in _OPTION_OF:
                raise
            value = getattr(options, _OPTION_OF[parameter])
            reason = str(error).removeprefix(f"{parameter}={value!r}: ")
            raise InvalidInputError(_option_of(parameter), value, reason) from None
        self.feed = CorpusFeed(self.corpus)
        self.outbox: CorpusOutbox | None = None  # while it is shared
        self.inbox: CorpusInbox | None = None  # while it is shared
        self._weight_version: int | None = None  # of the latest step
        self._vocab_size = vocab_size
        self._loads = ExternalLoader(self.corpus, max_tokens=options.max_external_tokens)
        self.initial_path = options.corpus_path
        if options.corpus_path is not None:
            self.load(options.corpus_path, "spec.corpus_path")

    @property
    def configured(self) -> Mapping[str, str]:
        return self._options.external_files

    @property
    def num_tokens(self) -> int:
        return self.corpus.num_tokens

    def begin_step(self, requests: Iterable[Request], weight_version: int) -> None:
        """Take in what came since the last step: finished loads, a new weight version, and tokens
        of other engines. ``requests``: those that run in the step."""
        self.publish()
        if weight_version != self._weight_version:
            self.feed.catch_up_all()  # while the corpus takes them for the old policy's
            self._weight_version = weight_version
        self.corpus.set_weight_version(weight_version)
        if self.outbox is not None:
            self.outbox.follow(requests)
        if self.inbox is not None:
            self.inbox.feed(weight_version, _LEARNED_PER_STEP)

    def release(self, request: Request) -> None:
        self.feed.leave(request)
        if self.outbox is not None:
            self.outbox.leave(request)

    def add_external(
        self,
        name: str,
        documents: Iterable[Sequence[NDArray[np.int32]]],
        fraction_read: Callable[[], float],
        publishing: Publishing,
    ) -> None:
        if name in self.corpus.external_names():
            self.corpus.remove_external(name)
        self._loads.start(
            name,
            documents,
            fraction_read=fraction_read,
            on_request=publishing is Publishing.ON_REQUEST,
        )

    def remove_external(self, name: str) -> None:
        self._loads.remove(name)

    def external_corpora(self) -> list[ExternalCorpus]:
        found = [
            each if each.error is None else replace(each, error=self._by_option(each.error))
            for each in self._loads.statuses()
        ]
        return sorted(found, key=lambda each: each.name)

    def wait(self, name: str, timeout: float | None) -> None:
        self._loads.wait(name, timeout)

    def publish(self) -> None:
        self._loads.publish()

    def publish_external(self, name: str) -> None:
        self._loads.publish_one(name)

    def share(self, max_bytes: int) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise InvalidInputError("max_bytes", max_bytes, "must be an integer >= 1")
        if self.outbox is not None:
            raise InvalidInputError("max_bytes", max_bytes, "the corpus is shared already")
        self.outbox = CorpusOutbox(max_bytes)
        self.inbox = CorpusInbox(self.corpus, max_bytes, self._vocab_size)
        self.feed.max_followed -= self.inbox.max_sequences

    def take_delta(self) -> CorpusDelta:
        if self.outbox is None:
            raise InvalidInputError("share_corpus", None, "must be called first")
        return self.outbox.take()

    def learn_deltas(self, deltas: Iterable[CorpusDelta]) -> None:
        if self.inbox is None or self.outbox is None:
            raise InvalidInputError("share_corpus", None, "must be called first")
        for delta in deltas:
            if delta.sender != self.outbox.sender:
                self.inbox.put(delta)

    def save(self, path: str | os.PathLike[str]) -> None:
        with whole_file(Path(path), shared=True) as file:
            self.corpus.save(file.name)

    def load(self, path: str | os.PathLike[str], field: str = "path") -> None:
        try:
            self.corpus.load(path)
        except ValueError as error:
            shown = os.fspath(path)
            reason = str(error).removeprefix(f"path={shown!r}: ")
            raise InvalidInputError(field, shown, self._by_option(reason)) from None
        loading = {each.name for each in self._loads.statuses() if each.state not in _AT_REST}
        for name in loading & set(self.corpus.external_names()):
            self.corpus.remove_external(name)  # what is being loaded replaces it

    def check_integrity(self) -> None:
        """Raise IntegrityError if the corpus's data structures contradict each other."""
        try:
            self.corpus.check_integrity()
        except RuntimeError as error:
            raise IntegrityError(f"the corpus: {error}") from None

    def close(self) -> None:
        self._loads.close()

    def counters(self) -> dict[str, float]:
        states = [each.state.value for each in self._loads.statuses()]
        own = {f"external_{state}": float(states.count(state)) for state in ("loading", "failed")}
        if self.outbox is not None and self.inbox is not None:
            own["shared_tokens"] = float(self.outbox.shared_tokens)
            own["unshared_rollouts"] = float(self.outbox.dropped_rollouts)
            own["learned_tokens"] = float(self.inbox.learned_tokens)
            own["lost_rollouts"] = float(self.inbox.lost_rollouts)
        return self.corpus.counters() | own

    def _by_option(self, reason: str) -> str:
        """The reason with the user's options in place of the corpus's parameters.

        A reason that quotes a document is returned as it is.
        """
        if not _OF_A_LIMIT.match(reason):
            return reason
        return re.sub(r"\b(\w+)=", lambda found: f"{_option_of(found[1])}=", reason)


def _option_of(parameter: str) -> str:
    option = _OPTION_OF.get(parameter)
    return parameter if option is None else f"spec.{option}"
