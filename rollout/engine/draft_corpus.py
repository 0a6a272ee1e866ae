"""DraftCorpus: a worker's corpus, as far as the engine deals with it."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.engine.corpus_delta import CorpusDelta
from rollout.errors import InvalidInputError


class ExternalState(enum.StrEnum):
    LOADING = "loading"  # or waiting for its turn
    READY = "ready"  # built; drafted from when it is published, between two steps
    PUBLISHED = "published"
    FAILED = "failed"  # nothing of it was loaded; listed until it is removed or added again


class Publishing(enum.StrEnum):
    """When drafts begin to be made from an external corpus that has been loaded."""

    WHEN_READY = "when_ready"  # the next step, or look at it
    ON_REQUEST = "on_request"  # `publish_external_corpus`: at one point on several engines


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalCorpus:
    """An external corpus, at the moment of asking."""

    name: str
    state: ExternalState
    num_tokens: int  # so far, while it loads
    num_bytes: int
    progress: float | None  # of its documents, in [0, 1]; None where that cannot be told
    error: str | None  # why it failed; of a published one, why another load of its name did


class DraftCorpus(Protocol):
    """Called on the engine's thread, between two steps.

    ``name`` is one of `external_corpora`, except for `add_external`: there only a failed or
    published one's.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens held, external corpora included."""
        ...

    @property
    def configured(self) -> Mapping[str, str]:
        """Name -> JSONL file of the external corpora to load beside the first steps."""
        ...

    @property
    def initial_path(self) -> str | None:
        """The file it was made from, if it was."""
        ...

    def add_external(
        self,
        name: str,
        documents: Iterable[Sequence[NDArray[np.int32]]],
        fraction_read: Callable[[], float],
        publishing: Publishing,
    ) -> None:
        """Load on a background thread, which iterates ``documents``, batches of token arrays.

        A published one of that name makes way at once, with its memory.
        """
        ...

    def remove_external(self, name: str) -> None:
        """Forget it; cancel it while it loads."""
        ...

    def external_corpora(self) -> list[ExternalCorpus]: ...

    def wait(self, name: str, timeout: float | None) -> None:
        """Return when it loads no more, or after ``timeout`` seconds."""
        ...

    def publish(self) -> None:
        """Draft from what is ready and waits for no request, from the next step on."""
        ...

    def publish_external(self, name: str) -> None:
        """Draft from ``name`` from the next step on; nothing where that is so already.

        Raises InvalidInputError where it is loading or has failed, or fails now.
        """
        ...

    def share(self, max_bytes: int) -> None:
        """Note from now on what is committed, and learn from others. Raises InvalidInputError."""
        ...

    def take_delta(self) -> CorpusDelta:
        """The tokens committed since the last delta. Raises InvalidInputError before `share`."""
        ...

    def learn_deltas(self, deltas: Iterable[CorpusDelta]) -> None:
        """Learn deltas of other engines beside the next steps; own ones are passed over. Raises
        InvalidInputError."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Whole or not at all. Raises OSError."""
        ...

    def load(self, path: str | os.PathLike[str]) -> None:
        """In place of what is held. Raises InvalidInputError or OSError; nothing changed then."""
        ...

    def close(self) -> None:
        """Cancel what loads; nothing can be added any more."""
        ...


def check_name(field: str, name: object) -> None:
    """Raise InvalidInputError naming ``field`` for what cannot be an external corpus's name."""
    if not isinstance(name, str) or not name:
        raise InvalidInputError(field, name, "must be a text of at least one character")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(
            field, name, "holds half of a surrogate pair; must be text that UTF-8 can encode"
        ) from None
