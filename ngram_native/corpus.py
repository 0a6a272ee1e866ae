"""The n-gram corpus: what was said so far, and from it what may come next.

Shape legend: B sequences of a call, N tokens or draft nodes of a call, flat.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngram_native import _ext
from ngram_native._ext import Proposal

MAX_BUDGET = 63
"""Draft nodes of one tree: with the root they fit a 64-bit ancestor mask."""


class Source(enum.IntEnum):
    """Where a draft node was copied from."""

    GROUP = 0  # a sample of the same prompt
    LIVE = 1  # another rollout
    EXTERNAL = 2  # an external corpus
    GAP = 3  # a sample of the same prompt that agrees up to the last token but not in it


class Corpus:
    """One per engine, shared by all its sequences; safe to call from many threads.

    Three kinds of scope feed one tree: the live scope (every token committed), a scope per group
    (the samples of one prompt, over all epochs) and named external corpora. Equal calls give
    equal trees, on every platform. Errors are ``ValueError`` naming the field, the value and the
    remedy; a refused call changes nothing.

    Args:
        max_bytes: Bound on the rollouts kept with their index and the open sequences; at least 256
            KiB. An eighth is the index's table, taken at once; a 32nd (64 KiB at least) is set
            aside for open sequences, 2 KiB each: `max_sequences` of them. What calls keep to work
            with comes on top, ``counters()["scratch_bytes"]``, some 100 KB. When the rest is full
            the oldest policy's pages go first, at constant cost per token. No more than 2**29
            tokens are kept.
        max_external_bytes: Bound on all external corpora together, those being built included with
            their working memory: of text about 13 bytes per token and 1 MiB, 11 once built; of
            tokens that hardly come again up to three times that.
        max_candidates: Earlier occurrences of a context looked at per scope: the most recent ones,
            or the longest matches of an external corpus.
        max_steps: Links followed per hash chain and query; default four per candidate.
        vocabulary: Says whose token ids these are, e.g. the tokenizer's name: `load` refuses what
            was saved under another.
        vocab_size: Token ids are below it; others are refused, in a file too.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 256 << 20,
        max_external_bytes: int = 1 << 30,
        max_candidates: int = 12,
        max_steps: int | None = None,
        vocabulary: str = "",
        vocab_size: int = 1 << 31,
    ) -> None:
        max_steps = 4 * max_candidates if max_steps is None else max_steps
        self._ext = _ext.Corpus(
            max_bytes=_integer("max_bytes", max_bytes, 1 << 62),
            max_external_bytes=_integer("max_external_bytes", max_external_bytes, 1 << 62),
            max_candidates=_integer("max_candidates", max_candidates, 1 << 31),
            max_steps=_integer("max_steps", max_steps, 1 << 31),
            vocabulary=vocabulary,
            vocab_size=_integer("vocab_size", vocab_size, (1 << 31) + 1, 1),
        )

    def insert(self, tokens: NDArray[np.int32], *, group: int | None = None) -> None:
        """Add a whole document to the live scope, and to the group's when one is given.

        Args:
            tokens: int32 ``(n,)``, each >= 0. Nothing crosses the document's ends.
            group: Any 64-bit key.
        """
        key = None if group is None else _group(group)
        self._ext.insert(_array("tokens", tokens, np.int32), key)

    def open(
        self, sequence_id: int, group: int, tokens: NDArray[np.int32], *, age: int = 0
    ) -> None:
        """A sequence begins.

        Its context enters the live and the group scope, except for the part that the group holds
        already: siblings share their prompt, and a rollout that is cut and resubmitted adds only
        what is new.

        Args:
            sequence_id: Any int64 that is not open.
            group: Any 64-bit key; the samples of one prompt share it.
            tokens: int32 ``(n,)``, each >= 0: the context so far, ending with the root.
            age: so many changes of the weight version ago another engine committed them; they count
                as if they had been held since.
        """
        self._ext.open(
            _sequence_id(sequence_id),
            _group(group),
            _array("tokens", tokens, np.int32),
            _integer("age", age, 1 << 32),
        )

    def extend(
        self,
        sequence_ids: NDArray[np.int64],
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        verified: NDArray[np.int32] | None = None,
        *,
        age: int = 0,
    ) -> None:
        """Newly committed tokens of many sequences.

        They enter the scopes once, move the sequences on, and judge what was last proposed for
        each: estimates are calibrated by it. A sequence that gets no token is left as it is, its
        proposal to be judged later.

        Args:
            sequence_ids: int64 ``(B,)``, open, each named once.
            tokens: int32 ``(N,)``, each >= 0, flat.
            offsets: int64 ``(B + 1,)``: sequence b gets ``tokens[offsets[b]:offsets[b + 1]]``.
            verified: int32 ``(B,)``: so many first nodes of what was last proposed for each
                sequence were verified; 0 where nothing was proposed since it last got tokens.
                Default: all that were proposed. What is below a node that was not verified says
                nothing about the estimates, so a number too high makes them drift low.
            age: as for `open`.
        """
        self._ext.extend(
            _array("sequence_ids", sequence_ids, np.int64),
            _array("tokens", tokens, np.int32),
            _array("offsets", offsets, np.int64),
            None if verified is None else _array("verified", verified, np.int32),
            _integer("age", age, 1 << 32),
        )

    def propose(
        self,
        sequence_ids: NDArray[np.int64],
        budgets: NDArray[np.int32],
        min_probability: float,
    ) -> Proposal:
        """Draft one tree for each sequence, all scopes merged.

        Args:
            sequence_ids: int64 ``(B,)``, open, each named once.
            budgets: int32 ``(B,)``: at most so many nodes, in [0, 63].
            min_probability: Nodes less likely than this to be accepted are not drafted.
        """
        try:
            return self._ext.propose(sequence_ids, budgets, min_probability)
        except TypeError:  # of another type or layout: say so, or make it fit
            return self._ext.propose(
                _array("sequence_ids", sequence_ids, np.int64),
                _array("budgets", budgets, np.int32),
                _number("min_probability", min_probability),
            )

    def query(
        self, group: int, tokens: NDArray[np.int32], budget: int, min_probability: float
    ) -> Proposal:
        """The proposal for a sequence with the context ``tokens``.

        Inserts and remembers nothing; the proposal has one entry. Arguments as for `open` and
        `propose`.
        """
        return self._ext.query(
            _group(group),
            _array("tokens", tokens, np.int32),
            _integer("budget", budget, 1 << 31),
            _number("min_probability", min_probability),
        )

    def close(self, sequence_id: int) -> None:
        """The sequence ended. Its tokens stay."""
        self._ext.close(_sequence_id(sequence_id))

    def set_weight_version(self, version: int) -> None:
        """Tokens from now on come from another policy; older ones count for less.

        What was learned about the estimates decays. The same version again changes nothing.
        """
        self._ext.set_weight_version(_sequence_id(version, "version"))

    def add_external(self, name: str, documents: Sequence[NDArray[np.int32]]) -> None:
        """Index documents as a frozen scope of its own; other calls go on meanwhile.

        Published whole when the call returns; `ExternalLoads` does it in the background. Refused,
        nothing loaded, when the name is taken or ``max_external_bytes`` would be exceeded.

        Args:
            name: Any string not in `external_names`.
            documents: int32 ``(n_i,)`` each, tokens >= 0.
        """
        self._ext.add_external(name, *flat_documents(documents))

    def external_builder(self) -> _ext.ExternalBuilder:
        """The builder of an external corpus for this one, for `publish_external`."""
        return _ext.ExternalBuilder(self._ext)

    def publish_external(self, name: str, builder: _ext.ExternalBuilder) -> None:
        """Make visible, whole and in constant time, what an `external_builder` has built.

        Refused when the name is taken.
        """
        self._ext.publish_external(name, builder)

    def remove_external(self, name: str) -> None:
        """Forget an external corpus. Its memory is freed without holding up other calls."""
        self._ext.remove_external(name)

    def withdraw_external(self, name: str) -> _ext.Withdrawn:
        """Forget an external corpus, in constant time; its memory waits for ``free()``."""
        return self._ext.withdraw_external(name)

    def external_names(self) -> list[str]:
        """The external corpora in force, sorted."""
        return self._ext.external_names()

    def external_sizes(self) -> dict[str, tuple[int, int]]:
        """Name -> tokens and bytes of the external corpora in force."""
        return self._ext.external_sizes()

    def reset(self) -> None:
        """Forget all rollouts and what was learned. Open sequences and external corpora stay."""
        self._ext.reset()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write rollouts, external corpora and calibration to a file, over the one there is.

        Other calls wait until it is written. Raises OSError when it cannot be; a part may have
        been then, which `load` refuses.
        """
        with open(path, "wb") as file:
            self._ext.save(file.fileno())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what `save` wrote, in place of all that is held.

        The corpus must have the same ``max_bytes`` and ``vocabulary``, and room for the file's
        external corpora, whose indices are made again. Open sequences stay open and go on as new
        documents.

        Raises:
            ValueError: The file is truncated, damaged or not a corpus; nothing changed.
            OSError: It cannot be read; nothing changed.
        """
        with open(path, "rb") as file:
            try:
                self._ext.load(file.fileno())
            except ValueError as error:
                raise ValueError(f"path={os.fspath(path)!r}: {error}") from None

    def check_integrity(self) -> None:
        """Raise RuntimeError with the reason when the corpus's own books do not balance."""
        reason = self._ext.check()
        if reason:
            raise RuntimeError(f"n-gram corpus: {reason}")

    @property
    def max_sequences(self) -> int:
        """Sequences that can be open together."""
        return self._ext.max_sequences()

    @property
    def num_tokens(self) -> int:
        """Tokens held, external corpora included."""
        return self._ext.num_tokens()

    @property
    def num_bytes(self) -> int:
        """Bytes held: at most max_bytes for rollouts and sequences, plus external corpora.

        Those being built count too, with their working memory.
        """
        return self._ext.num_bytes()

    def counters(self) -> dict[str, float]:
        """Gauges and running totals by name, for metrics."""
        return self._ext.counters()


def _array(name: str, value: object, dtype: type[np.generic]) -> NDArray:
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{name}=<{kind}>: must be a numpy array of {np.dtype(dtype).name}")
    if value.ndim != 1:
        raise ValueError(f"{name}=<array of shape {value.shape}>: must have one dimension")
    return np.ascontiguousarray(value)


def flat_documents(
    documents: Sequence[NDArray[np.int32]],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Documents end to end, int32 ``(N,)``, and where each begins, int64 ``(D + 1,)``.

    Raises ValueError for a document that is no one-dimensional int32 array.
    """
    arrays = [_array(f"documents[{i}]", d, np.int32) for i, d in enumerate(documents)]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    return np.concatenate([np.empty(0, np.int32), *arrays]), offsets


def _integer(name: str, value: int, end: int, begin: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}={value!r}: must be an integer")
    if not begin <= value < end:
        raise ValueError(f"{name}={value!r}: must be in [{begin}, {end})")
    return int(value)


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int | np.floating | np.integer):
        raise ValueError(f"{name}={value!r}: must be a number")
    return float(value)


def _sequence_id(value: int, name: str = "sequence_id") -> int:
    return _integer(name, value, 1 << 63, -(1 << 63))


def _group(value: int) -> int:
    """Signed and unsigned keys alike; both name the same 64 bits."""
    return _integer("group", value, 1 << 64, -(1 << 63)) % (1 << 64)
