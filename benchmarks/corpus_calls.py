"""The calls of interleaved sequences, arrays made beforehand so that only the corpus is timed.

Shape legend: B sequences of a call, N tokens of a call, flat.
"""

from __future__ import annotations

import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness.timing import clock_cost, cpu_clock, no_garbage_collection
from harness.traces import Trace
from numpy.typing import NDArray

from ngram_native import Corpus

MAX_BYTES = 256 << 20

BUDGET = 8
"""Draft nodes per request."""

ACTIVE = 64
"""Sequences of a batch."""

_WORDS = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(kw_only=True, slots=True)
class Document:
    group: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]


@dataclass(kw_only=True, slots=True)
class Call:
    """One call of `extend`, with the sequences closed and opened before it."""

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

    def extend(self, corpus: Corpus) -> None:
        corpus.extend(self.ids_B, self.tokens_N, self.offsets_B1)


@dataclass(kw_only=True, slots=True)
class Settings:
    """Settings of all parts of bench_corpus.py."""

    traces: list[Trace]
    quick: bool

    @property
    def longest_trace(self) -> Trace:
        return max(self.traces, key=lambda trace: trace.num_tokens)

    def calls(self, num_tokens: int) -> list[Call]:
        return interleave(documents_of(self.traces), num_tokens=num_tokens, active=ACTIVE)


def documents_of(traces: Sequence[Trace], first_group: int = 0) -> Iterator[Document]:
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


def interleave(documents: Iterable[Document], *, num_tokens: int, active: int) -> list[Call]:
    """Calls of ``active`` sequences with 1 to 4 tokens each (fewer where one ends), at least
    ``num_tokens`` in all or as long as enough documents are left."""
    rng = np.random.default_rng(0)
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
        calls.append(
            Call(
                closed=closed,
                opened=opened,
                ids_B=np.array([entry[0] for entry in open_B if entry is not None], np.int64),
                tokens_N=np.concatenate(tokens_B),
                offsets_B1=_offsets(counts_B.tolist()),
            )
        )
        at_B += counts_B
        total += len(calls[-1].tokens_N)
    return calls


def num_tokens(calls: Sequence[Call]) -> int:
    """The number of tokens that the calls extend by."""
    return sum(len(call.tokens_N) for call in calls)


def python_rate(calls: Sequence[Call], budget: int) -> float:
    """Tokens per CPU second through `Corpus.extend`, into a corpus that begins empty."""
    corpus = Corpus(max_bytes=MAX_BYTES)
    nanoseconds = -clock_cost() * len(calls)
    with no_garbage_collection():
        for call in calls:
            call.prepare(corpus)
            if budget > 0:
                corpus.propose(call.ids_B, np.full(len(call.ids_B), budget, np.int32), 0.0)
            start = cpu_clock()
            call.extend(corpus)
            nanoseconds += cpu_clock() - start
    return num_tokens(calls) / nanoseconds * 1e9


def real_text(num_tokens: int) -> list[NDArray[np.int32]]:
    """The source of Python's standard library, a document per file, cut off after ``num_tokens``.

    Tokens are words, runs of white space and symbols, numbered in the order they first come.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [*sorted(library.glob("*.py")), *sorted(library.glob("[a-r]*/*.py"))]
    numbers: dict[str, int] = {}
    documents: list[NDArray[np.int32]] = []
    left = num_tokens
    for file in files:
        if left <= 0:
            break
        words = _WORDS.findall(file.read_text(encoding="utf-8", errors="replace"))[:left]
        tokens = [numbers.setdefault(word, len(numbers)) for word in words]
        documents.append(np.array(tokens, np.int32))
        left -= len(words)
    return documents


def _offsets(counts: list[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *counts])
