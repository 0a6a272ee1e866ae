"""The load of one external corpus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ngram_native import ExternalBuilder, flat_documents
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState

Documents = Iterable[Sequence[NDArray[np.int32]]]
"""Batches of documents, each int32 ``(n,)`` with tokens >= 0."""

READING_SHARE = 0.9
"""Share of a load's progress for reading: it takes at least ten times as long as indexing."""


class ExternalLoad:
    """Reads and indexes documents on the thread that calls `run`; other threads may cancel it.

    The lock of its `ExternalLoader` guards every write, except to ``num_tokens`` and ``_is_read``,
    which only the loading thread writes.
    """

    def __init__(
        self,
        name: str,
        documents: Documents,
        fraction_read: Callable[[], float] | None,
        builder: ExternalBuilder,
        *,
        on_request: bool,
    ) -> None:
        self.name = name
        self.on_request = on_request  # published only by name
        self.state = ExternalState.LOADING
        self.error: str | None = None
        self.builder = builder
        self.num_tokens = 0
        self._documents = documents
        self._fraction_read = fraction_read
        self._is_read = False
        self._cancelled = threading.Event()

    def run(self, admit: Callable[[ExternalLoad, int], None]) -> bool:
        """Read and build. Returns False if cancelled; raises what iterating the documents raises.

        ``admit`` counts the tokens of a batch before they are stored, or raises to refuse them.
        """
        batches = iter(self._documents)
        try:
            for batch in batches:
                if not self._may_continue():
                    return False
                tokens, offsets = flat_documents(batch)
                admit(self, len(tokens))
                self.builder.append(tokens, offsets)
        finally:
            _close(batches)
        self._is_read = True
        return self.builder.build(self._may_continue)

    def cancel(self) -> None:
        self._cancelled.set()
        self.builder.cancel()

    def cancel_unstarted(self) -> None:
        """Cancel a load whose `run` was not and will not be called."""
        self.cancel()
        _close(self._documents)

    def fail(self, error: BaseException | None) -> None:
        """Mark the load as failed. ``error``: None if it stopped because the program is ending."""
        self.state = ExternalState.FAILED
        self.num_tokens = 0
        self.error = "the program is ending" if error is None else _reason(error)

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def status(self) -> ExternalCorpus:
        """The corpus at the moment of asking."""
        return ExternalCorpus(
            name=self.name,
            state=self.state,
            num_tokens=self.num_tokens,
            num_bytes=self.builder.num_bytes(),
            progress=self._progress(),
            error=self.error,
        )

    def _may_continue(self) -> bool:
        # The interpreter waits for this thread before it exits.
        return not self.is_cancelled and threading.main_thread().is_alive()

    def _progress(self) -> float | None:
        if self.state is ExternalState.FAILED:
            return None
        if self._is_read:
            return READING_SHARE + (1 - READING_SHARE) * self.builder.fraction_indexed()
        if self._fraction_read is None:
            return None
        return READING_SHARE * min(max(self._fraction_read(), 0.0), 1.0)


def _close(documents: object) -> None:
    close = getattr(documents, "close", None)  # of a generator
    if close is not None:
        close()


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
