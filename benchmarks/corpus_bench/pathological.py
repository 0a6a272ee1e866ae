"""Inputs that hurt suffix trees, tries and hash chains, against ordinary ones."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from replaying import replay
from table import Row, row
from traces import Trace

from corpus_bench.call_script import Document, documents_of, interleave
from corpus_bench.insertion import python_rate
from corpus_bench.settings import Settings
from corpus_bench.timed_drafter import TimedDrafter
from corpus_bench.timing import cpu_seconds, no_garbage_collection
from ngram_native import Corpus

SLOWER = 10.0  # than the ordinary case, at most


def pathological_rows(settings: Settings) -> list[Row]:
    """Interleaved sequences of one group, and one document, of a million tokens each."""
    total = 200_000 if settings.quick else 1_000_000
    ordinary = settings.longest_trace
    calls = interleave(
        documents_of([ordinary]), num_tokens=total, active=settings.active, seed=settings.seed
    )
    ordinary_rate = python_rate(calls, 0)
    ordinary_document = np.concatenate(ordinary.responses)[:total]
    ordinary_insert = document_seconds(ordinary_document) / len(ordinary_document)
    ordinary_propose = propose_time(ordinary, settings, limit=total)
    rows = []
    for name, stream in hard_streams(total, settings.seed).items():
        # One document per sequence: the next part of the stream, and all in one group.
        parts = np.array_split(stream, settings.active)
        empty = np.empty(0, np.int32)
        documents = [Document(group=0, prompt=empty, tokens=part) for part in parts]
        calls = interleave(documents, num_tokens=total, active=settings.active, seed=settings.seed)
        slower = {
            "extend": ordinary_rate / python_rate(calls, 0),
            "insert": document_seconds(stream) / len(stream) / ordinary_insert,
            "propose": propose_time(as_trace(name, parts), settings, limit=total)
            / ordinary_propose,
        }
        rows += [
            row(f"{name}: {what}", ratio, "x ordinary", SLOWER, at_most=True)
            for what, ratio in slower.items()
        ]
    return rows


def hard_streams(total: int, seed: int) -> dict[str, NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    shorter, longer = [0], [0, 1]
    while len(longer) < total:
        shorter, longer = longer, longer + shorter
    return {
        "one token": np.full(total, 7, np.int32),
        "Fibonacci word": np.array(longer[:total], np.int32),
        "random tokens": rng.integers(0, 50_000, total, dtype=np.int32),
        "random bits": rng.integers(0, 2, total, dtype=np.int32),
    }


def as_trace(name: str, parts: list[NDArray[np.int32]]) -> Trace:
    return Trace(
        name=name,
        prompts=[np.empty(0, np.int32)],
        responses=parts,
        prompt_of_R=np.zeros(len(parts), np.int64),
        epoch_of_R=np.zeros(len(parts), np.int64),
        temperature_of_R=np.full(len(parts), np.nan),
        steps=[list(range(len(parts)))],
    )


def document_seconds(stream: NDArray[np.int32]) -> float:
    """CPU time of one `Corpus.insert`."""
    corpus = Corpus()
    return cpu_seconds(lambda: corpus.insert(stream, group=0))


def propose_time(trace: Trace, settings: Settings, *, limit: int) -> float:
    """Median CPU time per request of full batches: the ends of the responses, ``limit / 8`` tokens
    in all, are replayed into a corpus that holds the whole trace already."""
    corpus = Corpus()
    for response, tokens in enumerate(trace.responses):
        corpus.insert(tokens, group=int(trace.prompt_of_R[response]))
    share = max(1, limit // 8 // len(trace.responses))
    ends = replace(trace, responses=[tokens[-share:] for tokens in trace.responses])
    timed = TimedDrafter(corpus, [settings.budget])
    with no_garbage_collection():
        replay(ends, timed, budget=settings.budget, active=settings.active)
    full = max(timed.samples)
    return statistics.median(timed.samples[full]) / full[0]
