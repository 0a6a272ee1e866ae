"""The calls of interleaved sequences, arrays made beforehand so that only the corpus is timed.

Shape legend: B sequences of a call, N tokens of a call, flat, D documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from traces import Trace

from ngram_native import Corpus


@dataclass(kw_only=True, slots=True)
class Document:
    group: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]


@dataclass(kw_only=True, slots=True)
class Call:
    """One extend, and what comes before it."""

    closed: list[int]
    opened: list[tuple[int, Document]]  # by sequence id
    ids_B: NDArray[np.int64]
    tokens_N: NDArray[np.int32]
    offsets_B1: NDArray[np.int64]

    def prepare(self, corpus: Corpus) -> None:
        for sequence_id in self.closed:
            corpus.close(sequence_id)
        for sequence_id, document in self.opened:
            corpus.open(sequence_id, document.group, document.prompt)


def documents_of(traces: list[Trace], first_group: int = 0) -> Iterator[Document]:
    """The responses in the order they were started, again and again; each round has groups of its
    own, as the rollouts of other prompts would."""
    group = first_group
    while True:
        for trace in traces:
            for response in itertools.chain.from_iterable(trace.steps):
                prompt = int(trace.prompt_of_R[response])
                yield Document(
                    group=group + prompt,
                    prompt=trace.prompts[prompt],
                    tokens=trace.responses[response],
                )
            group += len(trace.prompts)


def interleave(
    documents: Iterable[Document], *, num_tokens: int, active: int, seed: int
) -> list[Call]:
    """Calls of ``active`` sequences with 1 to 4 tokens each (fewer where one ends), at least
    ``num_tokens`` in all or as long as enough documents are left."""
    rng = np.random.default_rng(seed)
    source, ids = iter(documents), itertools.count()
    at_B = np.zeros(active, np.int64)
    open_B: list[tuple[int, Document] | None] = [None] * active
    length_B = np.zeros(active, np.int64)
    calls: list[Call] = []
    total = 0
    while total < num_tokens:
        closed, opened = [], []
        for b in np.flatnonzero(at_B == length_B).tolist():
            document = next(source, None)
            if document is None:
                return calls
            ended = open_B[b]
            if ended is not None:
                closed.append(ended[0])
            begun = open_B[b] = (next(ids), document)
            opened.append(begun)
            at_B[b], length_B[b] = 0, len(document.tokens)
        counts_B = np.minimum(rng.integers(1, 5, active), length_B - at_B)
        tokens_B = [
            entry[1].tokens[at : at + count]
            for entry, at, count in zip(open_B, at_B.tolist(), counts_B.tolist(), strict=True)
            if entry is not None
        ]
        offsets_B1 = np.zeros(active + 1, np.int64)
        np.cumsum(counts_B, out=offsets_B1[1:])
        calls.append(
            Call(
                closed=closed,
                opened=opened,
                ids_B=np.array([entry[0] for entry in open_B if entry is not None], np.int64),
                tokens_N=np.concatenate(tokens_B),
                offsets_B1=offsets_B1,
            )
        )
        at_B += counts_B
        total += int(offsets_B1[-1])
    return calls


def num_tokens(calls: list[Call]) -> int:
    """Of the extends."""
    return sum(len(call.tokens_N) for call in calls)


def write_script(calls: list[Call], path: Path) -> None:
    """For `native/insert.cpp`: arrays of int64, each behind its length, in the order read there."""
    opened = [entry for call in calls for entry in call.opened]
    arrays: list[list[int] | NDArray] = [
        _offsets([len(call.closed) for call in calls]),
        [sequence_id for call in calls for sequence_id in call.closed],
        _offsets([len(call.opened) for call in calls]),
        [sequence_id for sequence_id, _ in opened],
        [document.group for _, document in opened],
        _offsets([len(document.prompt) for _, document in opened]),
        np.concatenate([document.prompt for _, document in opened]),
        _offsets([len(call.ids_B) for call in calls]),
        np.concatenate([call.ids_B for call in calls]),
        np.concatenate([np.diff(call.offsets_B1) for call in calls]),
        np.concatenate([call.tokens_N for call in calls]),
    ]
    with path.open("wb") as file:
        for array in arrays:
            values = np.asarray(array, np.int64)
            file.write(np.int64(len(values)).tobytes())
            file.write(values.tobytes())


def _offsets(counts: list[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *counts])
