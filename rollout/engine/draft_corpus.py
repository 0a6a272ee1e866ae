"""The protocol of a worker's corpus, external corpora, and the deltas that corpora exchange."""

from __future__ import annotations

import enum
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from rollout.errors import InvalidInputError

_DTYPES = {
    "groups_C": np.uint64,
    "context_offsets_C1": np.int64,
    "context_tokens_M": np.int32,
    "rollouts_B": np.int64,
    "contexts_B": np.int32,
    "starts_B": np.int32,
    "versions_B": np.int64,
    "ends_B": np.bool_,
    "offsets_B1": np.int64,
    "tokens_N": np.int32,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorpusDelta:
    """Spans of rollouts, in the order they were committed; flat arrays.

    The spans of one rollout follow each other without gaps, in this delta and over the later ones
    of the same sender, so the receiver joins them into one document. Siblings whose rollouts begin
    in one delta share their prompt.

    Legend: C contexts that rollouts begin with, M their tokens, B spans, N their tokens.
    """

    sender: int  # a random number in [0, 2**63): one engine, from when it began to share
    number: int  # counts the sender's deltas from 0
    groups_C: NDArray[np.uint64]  # prompt groups
    context_offsets_C1: NDArray[np.int64]
    context_tokens_M: NDArray[np.int32]  # a prompt, and what was generated before a resubmission
    rollouts_B: NDArray[np.int64]  # the sender's request ids
    contexts_B: NDArray[np.int32]  # the context, of a rollout's first span; -1 of later ones
    starts_B: NDArray[np.int32]  # tokens the rollout had emitted before this span
    versions_B: NDArray[np.int64]  # of the weights that sampled the span
    ends_B: NDArray[np.bool_]  # nothing more will come of the rollout
    offsets_B1: NDArray[np.int64]
    tokens_N: NDArray[np.int32]

    def __post_init__(self) -> None:
        """Raises InvalidInputError, naming the array, for a delta that no `share_corpus`
        returns."""

        def require(name: str, ok: bool, remedy: str) -> None:
            if not ok:
                shown = getattr(self, name)
                if isinstance(shown, np.ndarray):
                    shown = f"{shown.dtype} {list(shown.shape)}"
                raise InvalidInputError(f"delta.{name}", shown, remedy)

        for name in ("sender", "number"):
            value = getattr(self, name)
            ok = type(value) is int and 0 <= value < 2**63
            require(name, ok, "must be an integer in [0, 2**63)")
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            ok = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype
            require(name, ok, f"must be a one-dimensional array of {np.dtype(dtype).name}")
        for name in ("contexts_B", "starts_B", "versions_B", "ends_B"):
            same = getattr(self, name).size == self.rollouts_B.size
            require(name, same, f"must have an entry per span: {self.rollouts_B.size}")
        for offsets, count, flat in (
            ("context_offsets_C1", self.groups_C.size, self.context_tokens_M.size),
            ("offsets_B1", self.rollouts_B.size, self.tokens_N.size),
        ):
            values = getattr(self, offsets)
            ok = values.size == count + 1 and values[0] == 0 and values[-1] == flat
            ok = ok and bool((np.diff(values) >= 0).all())
            require(offsets, ok, f"must rise from 0 to {flat} in {count} steps")
        in_range = (self.contexts_B >= -1) & (self.contexts_B < self.groups_C.size)
        require("contexts_B", bool(in_range.all()), f"must be in [-1, {self.groups_C.size})")
        begins = self.contexts_B >= 0
        require("starts_B", bool(((self.starts_B == 0) | (~begins & (self.starts_B > 0))).all()),
                "must be 0 of a rollout's first span, and >= 0 of others")  # fmt: skip
        for name in ("context_tokens_M", "tokens_N"):
            require(name, bool((getattr(self, name) >= 0).all()), "token ids must be >= 0")

    def to_bytes(self) -> bytes:
        """The delta as an uncompressed npz file, for `from_bytes`."""
        file = io.BytesIO()
        arrays: dict[str, Any] = {
            each.name: np.asarray(getattr(self, each.name)) for each in fields(self)
        }
        np.savez(file, **arrays)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The delta that `to_bytes` wrote. Raises InvalidInputError, naming the array, for one
        that no `share_corpus` returns."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            values: dict[str, Any] = {name: arrays[name] for name in _DTYPES}
            return cls(sender=int(arrays["sender"]), number=int(arrays["number"]), **values)

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of all spans, without their contexts."""
        return self.tokens_N.size


class ExternalState(enum.StrEnum):
    """The state of an external corpus, from loading to drafting."""

    LOADING = "loading"  # or waiting for its turn
    READY = "ready"  # built; drafted from when it is published, between two steps
    PUBLISHED = "published"
    FAILED = "failed"  # nothing of it was loaded; listed until it is removed or added again


class Publishing(enum.StrEnum):
    """The time from which drafts are made from an external corpus that has been loaded."""

    WHEN_READY = "when_ready"  # the next step, or look at it
    ON_REQUEST = "on_request"  # the call of `publish_external_corpus`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalCorpus:
    """An external corpus, at the moment of asking."""

    name: str
    state: ExternalState
    num_tokens: int  # so far, while it loads
    num_bytes: int
    progress: float | None  # share of its documents that was read; None if that is unknown
    error: str | None  # why it failed; of a published one, why another load of its name did


class DraftCorpus(Protocol):
    """The corpus that a worker drafts from. Called on the engine's thread, between two steps.

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
        """The file the corpus was made from; None without one."""
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
        """Return when ``name`` is no longer loading, or after ``timeout`` seconds."""
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
        """Write the corpus to a file, whole or not at all. Raises OSError."""
        ...

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the contents by a saved file's. Raises InvalidInputError or OSError; nothing
        changed then."""
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
