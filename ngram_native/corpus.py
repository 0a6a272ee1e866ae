"""The n-gram corpus: earlier tokens, and from them draft trees for the next ones.

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
    """The scope that a draft node was copied from."""

    GROUP = 0  # a sample of the same prompt
    LIVE = 1  # another rollout
    EXTERNAL = 2  # an external corpus
    GAP = 3  # a sample of the same prompt that differs in the last token only


class Corpus:
    """Scopes of tokens that draft trees are copied from. Safe to call from many threads.

    An engine has one, shared by all its sequences. Three kinds of scope feed one tree: the live
    scope (every committed token), a scope per group (the samples of one prompt, over all epochs)
    and named external corpora. Equal calls give equal trees, on every platform. Errors are
    ``ValueError`` naming the field, the value and the remedy; a refused call changes nothing.

    Args:
        max_bytes: Bound on rollouts, their index and open sequences; at least 256 KiB. An eighth is
            the index's table, allocated at once. A 32nd (at least 64 KiB) is reserved for open
            sequences, 2 KiB each: `max_sequences` of them. Scratch memory comes on top:
            ``counters()["scratch_bytes"]``, some 100 KB. When the rest is full the oldest policy's
            pages are dropped first, at constant cost per token. At most 2**29 tokens are held.
        max_external_bytes: Bound on all external corpora together, including those being built and
            their working memory. Text takes about 13 bytes per token and 1 MiB while it is built,
            11 bytes per token afterwards; tokens that hardly recur, up to three times that.
        max_candidates: Occurrences of a context that are examined per scope: the most recent ones,
            or the longest matches of an external corpus.
        max_steps: Links followed per hash chain and query; default: four per candidate.
        vocabulary: Identifies the token ids, for example the tokenizer's name; `load` refuses a
            file saved under another one.
        vocab_size: Token ids must be below it, in files too.
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
        """Begin a sequence.

        Its context enters the live and the group scope, except for the part that the group already
        holds: samples share their prompt, and a resubmitted rollout adds only its new tokens.

        Args:
            sequence_id: Any int64 that is not open.
            group: Any 64-bit key; the samples of one prompt share it.
            tokens: int32 ``(n,)``, each >= 0: the context so far, ending with the root.
            age: How many weight versions ago another engine committed the tokens; they count as if
                they had been inserted then.
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
        """Append newly committed tokens to many sequences.

        The tokens enter the scopes once, advance the sequences, and calibrate the estimates of each
        sequence's last proposal. A sequence without new tokens is left as it is, and its proposal
        is judged later.

        Args:
            sequence_ids: int64 ``(B,)``, open, each named once.
            tokens: int32 ``(N,)``, each >= 0, flat.
            offsets: int64 ``(B + 1,)``: sequence b gets ``tokens[offsets[b]:offsets[b + 1]]``.
            verified: int32 ``(B,)``: the number of first nodes of each sequence's last proposal
                that were verified; 0 if nothing was proposed since its last tokens. Default: all
                proposed nodes. Nodes below an unverified one say nothing about the estimates, so a
                number that is too high makes estimates drift low.
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
            min_probability: Nodes with a lower acceptance probability are not drafted.
        """
        try:
            return self._ext.propose(sequence_ids, budgets, min_probability)
        except TypeError:  # wrong type or layout: convert, or raise an error that names it
            return self._ext.propose(
                _array("sequence_ids", sequence_ids, np.int64),
                _array("budgets", budgets, np.int32),
                _number("min_probability", min_probability),
            )

    def query(
        self, group: int, tokens: NDArray[np.int32], budget: int, min_probability: float
    ) -> Proposal:
        """The proposal for a sequence with the context ``tokens``, without changing the corpus.

        The proposal has one entry. Arguments are as for `open` and `propose`.
        """
        return self._ext.query(
            _group(group),
            _array("tokens", tokens, np.int32),
            _integer("budget", budget, 1 << 31),
            _number("min_probability", min_probability),
        )

    def close(self, sequence_id: int) -> None:
        """End a sequence. Its tokens stay."""
        self._ext.close(_sequence_id(sequence_id))

    def set_weight_version(self, version: int) -> None:
        """Declare that tokens from now on come from another policy; older ones count for less.

        The calibration of the estimates decays. Setting the same version again changes nothing.
        """
        self._ext.set_weight_version(_sequence_id(version, "version"))

    def add_external(self, name: str, documents: Sequence[NDArray[np.int32]]) -> None:
        """Index documents as an immutable scope; other calls continue meanwhile.

        The corpus is published whole when the call returns. `ExternalLoader` does it in the
        background. Refused, with nothing loaded, if the name is taken or ``max_external_bytes``
        would be exceeded.

        Args:
            name: Any string not in `external_names`.
            documents: int32 ``(n_i,)`` each, tokens >= 0.
        """
        self._ext.add_external(name, *flat_documents(documents))

    def external_builder(self) -> _ext.ExternalBuilder:
        """A builder of an external corpus, for `publish_external`."""
        return _ext.ExternalBuilder(self._ext)

    def publish_external(self, name: str, builder: _ext.ExternalBuilder) -> None:
        """Publish what an `external_builder` has built, whole and in constant time.

        Refused if the name is taken.
        """
        self._ext.publish_external(name, builder)

    def remove_external(self, name: str) -> None:
        """Remove an external corpus. Its memory is freed without delaying other calls."""
        self._ext.remove_external(name)

    def withdraw_external(self, name: str) -> _ext.Withdrawn:
        """Remove an external corpus in constant time. Call ``free()`` on the result to free
        memory."""
        return self._ext.withdraw_external(name)

    def external_names(self) -> list[str]:
        """Names of the published external corpora, sorted."""
        return self._ext.external_names()

    def external_sizes(self) -> dict[str, tuple[int, int]]:
        """Tokens and bytes of the published external corpora, by name."""
        return self._ext.external_sizes()

    def reset(self) -> None:
        """Drop all rollouts and the calibration. Open sequences and external corpora stay."""
        self._ext.reset()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write rollouts, external corpora and calibration to a file, over the one there is.

        Other calls wait until it is written. Raises OSError when it cannot be; a part may have
        been then, which `load` refuses.
        """
        with open(path, "wb") as file:
            self._ext.save(file.fileno())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the contents by those of a file that `save` wrote.

        The corpus must have the same ``max_bytes`` and ``vocabulary``, and room for the file's
        external corpora, whose indices are rebuilt. Open sequences stay open and continue as new
        documents.

        Raises:
            ValueError: The file is truncated, damaged or not a corpus; nothing changed.
            OSError: The file cannot be read; nothing changed.
        """
        with open(path, "rb") as file:
            try:
                self._ext.load(file.fileno())
            except ValueError as error:
                raise ValueError(f"path={os.fspath(path)!r}: {error}") from None

    def check_integrity(self) -> None:
        """Raise RuntimeError with the reason if the corpus's data structures are inconsistent."""
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

        External corpora that are being built count with their working memory.
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
    """Documents concatenated, int32 ``(N,)``, and their offsets, int64 ``(D + 1,)``.

    Raises ValueError for a document that is not a one-dimensional int32 array.
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
    """A group key as an unsigned integer; signed keys name the same 64 bits."""
    return _integer("group", value, 1 << 64, -(1 << 63)) % (1 << 64)
