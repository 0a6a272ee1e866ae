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
        """Load a corpus to draft from, from exactly one source; its name.

        Args:
            name: not that of another, unless it failed; default: a random one.
            documents: texts. As a file's texts, they are encoded as they stand, without special
                tokens, since drafts continue running text.
            token_chunks: token ids, a sequence per document.
            file_path: JSONL, per line a JSON string or an object with ``text``.
            publish: ``when_ready``, or ``on_request``: by `publish_external_corpus` alone.
            wait: return when it is published, or ready where that is on request, and raise
                InvalidInputError if it could not be loaded, its name being free again. Else
                `external_corpora` says how far it is.

        A document that cannot be used, or a limit exceeded, fails the whole load: none of the
        documents is drafted from. They must not be changed while they load. Raises
        InvalidInputError.
        """
        corpus = self._external()
        if name is None:
            name = self._worker.ranks.tensor.all_gather_text(uuid.uuid4().hex)[0]
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
        """Forget an external corpus, or cancel its load. Raises InvalidInputError if unknown."""
        corpus = self._external()
        self._require_known(corpus, name)
        corpus.remove_external(name)

    def publish_external_corpus(self, name: str) -> None:
        """Draft from an external corpus from the next step on; does nothing where it is published.

        Raises InvalidInputError where it is unknown, loading or failed.
        """
        corpus = self._external()
        self._require_known(corpus, name)
        corpus.publish_external(name)

    def external_corpora(self) -> list[ExternalCorpus]:
        """All external corpora by name; publishes those that are ready and wait for no request.

        Every tensor-parallel rank makes this call, as all others about corpora: corpora that all
        ranks have loaded are published on all at once, in this call or in the next step.
        """
        corpus = self._external()
        corpus.publish()
        return corpus.external_corpora()

    def wait_for_external_corpora(self, timeout: float | None = None) -> list[ExternalCorpus]:
        """Wait until no external corpus loads; returns all of them, failed ones with the reason.

        Raises TimeoutError after ``timeout`` seconds.
        """
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
        """Begin to exchange what is committed with other engines of the same model.

        Requests that run are shared whole, ended ones are not. Off until it is called.

        Args:
            max_bytes: bound on the tokens that wait to be taken, and on those that wait to be
                learned. Beyond it whole rollouts are left out, the oldest first, and counted.

        Raises InvalidInputError the second time.
        """
        self._corpus().share(max_bytes)

    def take_corpus_delta(self) -> CorpusDelta:
        """The tokens this engine's own requests committed since the last delta, each once.

        Raises InvalidInputError before `share_corpus`.
        """
        return self._corpus().take_delta()

    def learn_corpus_deltas(self, deltas: Sequence[CorpusDelta]) -> None:
        """Take in what other engines committed, as if it had been rolled out here.

        One sender's deltas come in the order in which they were taken, deltas of several senders in
        any order; the engine's own are passed over. The next steps feed the corpus, each a bounded
        number of tokens. Raises InvalidInputError, also before `share_corpus`.
        """
        deltas = list(checked_iterable(deltas, "deltas", "CorpusDeltas"))
        for delta in deltas:
            if not isinstance(delta, CorpusDelta):
                raise InvalidInputError("deltas", delta, "must be a list of CorpusDeltas")
        self._corpus().learn_deltas(deltas)

    def save_corpus(self, path: str | os.PathLike[str]) -> None:
        """Write rollouts, published external corpora, calibration and weight version to a file.

        The file, for a trainer's checkpoint, is written whole or not at all. Tensor-parallel ranks
        have equal corpora, and rank 0 writes the file. The lengths of rollouts go into
        ``<path>.learned.json``. Raises OSError, and InvalidInputError where ``path`` is a folder or
        a device.
        """
        corpus, path = self._corpus(), checked_path(path, "path")
        for each in (Path(path), learned_file(path)):
            if each.exists() and not each.is_file():
                raise InvalidInputError("path", str(each), "is no file: choose another name")
        if self._worker.ranks.tensor.rank:
            return
        corpus.save(path)
        save_learned(learned_file(path), {"lengths": self._lengths.learned()})

    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        """Go on with the corpus that `save_corpus` wrote, in place of the one held.

        Bring the engine to the weights and weight version of the checkpoint first: rollouts of
        another version count as those of an older policy. External corpora that are loading go on
        and replace the file's of the same name, as configured ones do. Before the first step the
        latter have not begun, so that the file finds the room it was saved from.

        Raises InvalidInputError for a file that is damaged, of another vocabulary or of another
        ``spec.corpus_bytes``, OSError for one that cannot be read; the corpus is as it was then.
        Trouble with the file beside it is logged and left at that.
        """
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
        """The learned costs of steps and worth of drafts, JSON-able: the cost curve, calibration,
        ..."""
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
