"""The corpus that the engine's drafts come from, and the external corpora beside it."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.engine.corpus_documents import FileDocuments, documents_from
from rollout.engine.draft_corpus import (
    CorpusDelta,
    DraftCorpus,
    ExternalCorpus,
    ExternalState,
    Publishing,
    check_name,
)
from rollout.engine.learned_file import learned_file, load_learned, save_learned
from rollout.engine.step_runner import StepRunner
from rollout.engine.tokenizer import PromptEncoder
from rollout.engine.worker import Worker
from rollout.errors import InvalidInputError
from rollout.validation import (
    checked_flag,
    checked_iterable,
    checked_member,
    checked_path,
    checked_seconds,
)

log = logging.getLogger(__name__)


class Corpora:
    """The corpora that drafts are made from. They never change a rollout, only how fast it comes.

    External corpora are texts to draft from beside the rollouts themselves: code, documents,
    reference answers. They load in the background while generation goes on, and each becomes
    visible as a whole between two steps. With a worker that has no corpus (``spec=none``) every
    call but `close` raises InvalidInputError.
    """

    def __init__(self, worker: Worker, encoder: PromptEncoder, steps: StepRunner) -> None:
        """Restores the lengths beside the file that the corpus was made from, if it was made from
        one."""
        self._worker = worker
        self._encoder = encoder
        self._steps = steps
        self._lengths = steps.scheduler.lengths
        corpus = worker.draft_corpus
        self._unstarted = {  # configured, and not begun to load
            name: FileDocuments(encoder, path, f"spec.external_corpora.{name}")
            for name, path in ({} if corpus is None else corpus.configured).items()
        }
        path = None if corpus is None else corpus.initial_path
        if path is not None:
            self._restore_lengths(learned_file(path))

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
        corpus = self._external()
        if name is None:
            name = uuid.uuid4().hex
        check_name("name", name)
        publishing = checked_member(publish, "publish", Publishing)
        wait = checked_flag(wait, "wait")
        there = corpus.external_corpora()
        if any(each.name == name and each.state is not ExternalState.FAILED for each in there):
            raise InvalidInputError("name", name, "is taken: remove that corpus, or choose another")
        source = documents_from(
            self._encoder, documents=documents, token_chunks=token_chunks, file_path=file_path
        )
        corpus.add_external(name, source, source.fraction_read, publishing)
        if wait:
            corpus.wait(name, None)
            self._require_loaded(corpus, name)
        return name

    def remove_external_corpus(self, name: str) -> None:
        corpus = self._external()
        self._require_known(corpus, name)
        corpus.remove_external(name)

    def publish_external_corpus(self, name: str) -> None:
        corpus = self._external()
        self._require_known(corpus, name)
        corpus.publish_external(name)

    def external_corpora(self) -> list[ExternalCorpus]:
        corpus = self._external()
        corpus.publish()
        return corpus.external_corpora()

    def wait_for_external_corpora(self, timeout: float | None = None) -> list[ExternalCorpus]:
        corpus = self._external()
        if timeout is not None:
            timeout = checked_seconds(timeout, "timeout", minimum=0)
        deadline = None if timeout is None else time.monotonic() + timeout
        for name in _loading(corpus):
            corpus.wait(name, None if deadline is None else max(0.0, deadline - time.monotonic()))
        corpora = self.external_corpora()
        if loading := _loading(corpus):
            raise TimeoutError(f"still loading after {timeout} s: {', '.join(loading)}")
        return corpora

    def share_corpus(self, max_bytes: int = 8 << 20) -> None:
        self._corpus().share(max_bytes)

    def take_corpus_delta(self) -> CorpusDelta:
        return self._corpus().take_delta()

    def learn_corpus_deltas(self, deltas: Sequence[CorpusDelta]) -> None:
        deltas = list(checked_iterable(deltas, "deltas", "CorpusDeltas"))
        for delta in deltas:
            if not isinstance(delta, CorpusDelta):
                raise InvalidInputError("deltas", delta, "must be a list of CorpusDeltas")
        self._corpus().learn_deltas(deltas)

    def save_corpus(self, path: str | os.PathLike[str]) -> None:
        corpus, path = self._corpus(), checked_path(path, "path")
        for each in (Path(path), learned_file(path)):
            if each.exists() and not each.is_file():
                raise InvalidInputError("path", str(each), "is no file: choose another name")
        corpus.save(path)
        save_learned(learned_file(path), {"lengths": self._lengths.learned()})

    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        corpus, path = self._corpus(), checked_path(path, "path")
        corpus.load(path)
        self._restore_lengths(learned_file(path))

    def load_configured_corpora(self) -> None:
        """Begin to load the corpora of ``spec.external_corpora``; does nothing the second time.

        The first step does it, and every call about external corpora; `load_corpus` does not.
        """
        while self._unstarted:
            name, source = next(iter(self._unstarted.items()))
            self._corpus().add_external(name, source, source.fraction_read, Publishing.WHEN_READY)
            del self._unstarted[name]

    def close(self) -> None:
        """Cancel what loads, for good: no external corpus can be added any more."""
        self._unstarted.clear()
        if self._worker.draft_corpus is not None:
            self._worker.draft_corpus.close()

    def learned(self) -> dict[str, Any]:
        return {"budget": self._worker.learned()}

    def _restore_lengths(self, file: Path) -> None:
        """Start from the lengths in ``file``, if it is there and whole."""
        try:
            learned = load_learned(file)
            if "lengths" in learned:
                self._lengths.restore(learned["lengths"])
        except (OSError, ValueError) as error:
            log.warning("%s is not used: %s", file, error)

    def _external(self) -> DraftCorpus:
        corpus = self._corpus()
        self.load_configured_corpora()
        return corpus

    def _corpus(self) -> DraftCorpus:
        corpus = self._worker.draft_corpus
        if corpus is None:
            worker = type(self._worker).__name__
            raise InvalidInputError(
                "spec", worker, "has no corpus to draft from; spec=ngram has one"
            )
        return corpus

    def _require_known(self, corpus: DraftCorpus, name: str) -> None:
        check_name("name", name)
        if name not in (known := [each.name for each in corpus.external_corpora()]):
            raise InvalidInputError(
                "name", name, f"is unknown; there are {', '.join(known) or 'none'}"
            )

    def _require_loaded(self, corpus: DraftCorpus, name: str) -> None:
        (own,) = (each for each in self.external_corpora() if each.name == name)
        if own.state is ExternalState.FAILED:
            corpus.remove_external(name)
            raise InvalidInputError("name", name, f"could not be loaded: {own.error}")


def _loading(corpus: DraftCorpus) -> list[str]:
    return [each.name for each in corpus.external_corpora() if each.state is ExternalState.LOADING]
