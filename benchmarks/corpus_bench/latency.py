"""Pauses: the slowest calls against the usual ones, while memory is dropped or freed."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from table import Row, row

from corpus_bench.call_script import Call, documents_of, interleave
from corpus_bench.settings import Settings
from corpus_bench.text import real_text
from corpus_bench.timing import clock_cost, cpu_clock, no_garbage_collection, tail_ratio
from ngram_native import Corpus

LONGEST = 5.0  # times the median, at most
SMALL = 8 << 20
TOKENS = 1_000_000  # of the external corpus
CALLS_BEFORE = 300
SECONDS_AFTER = 0.05  # where a cost put off would show


class Batches:
    """Proposes and extends, timed call by call in nanoseconds, tokens prepared beforehand."""

    def __init__(self, calls: list[Call], budget: int, clock: Callable[[], int]) -> None:
        self._calls = iter(calls)
        self._budgets_B = np.full(len(calls[0].ids_B), budget, np.int32)
        self._clock = clock
        self._cost = clock_cost() if clock is cpu_clock else 0

    def run(self, corpus: Corpus) -> Iterator[tuple[int, int]]:
        """Times of propose and extend, as long as there are calls."""
        clock = self._clock
        for call in self._calls:
            call.prepare(corpus)
            start = clock()
            corpus.propose(call.ids_B, self._budgets_B, 0.0)
            proposed = clock()
            corpus.extend(call.ids_B, call.tokens_N, call.offsets_B1)
            extended = clock()
            yield proposed - start - self._cost, extended - proposed - self._cost


def latency_rows(settings: Settings) -> list[Row]:
    calls = interleave(
        documents_of(settings.traces),
        num_tokens=600_000 if settings.quick else 1_500_000,
        active=settings.active,
        seed=settings.seed,
    )
    documents = real_text(settings.external_text, TOKENS)
    rounds = 3 if settings.quick else 7
    with no_garbage_collection():
        rows = eviction_rows(calls, settings.budget)
        rows += removal_elsewhere_rows(calls, settings.budget, documents, rounds)
        rows += removal_here_rows(calls, settings.budget, documents, rounds)
    return rows


def eviction_rows(calls: list[Call], budget: int) -> list[Row]:
    """CPU time of the calls of a full corpus, which drops as much as it takes in."""
    corpus = Corpus(max_bytes=SMALL)
    times, full = [], False
    for pair in Batches(calls, budget, cpu_clock).run(corpus):
        if full:
            times.append(pair)
        else:
            full = corpus.counters()["dropped_tokens"] > 0
    proposes, extends = zip(*times, strict=True)
    return [
        row("evicting: propose", statistics.median(proposes) / 1e3, "us/call"),
        row("evicting: propose, p99.9", tail_ratio(proposes), "x median", LONGEST, at_most=True),
        row("evicting: extend", statistics.median(extends) / 1e3, "us/call"),
        row("evicting: extend, p99.9", tail_ratio(extends), "x median", LONGEST, at_most=True),
    ]


def removal_elsewhere_rows(
    calls: list[Call], budget: int, documents: list[NDArray[np.int32]], rounds: int
) -> list[Row]:
    """Wall time, since what may hurt is a lock held. The median over rounds, for the machine may
    be busy with others in some of them; how noisy it is, the calls without a removal tell."""
    corpus = Corpus()
    batches = Batches(calls, budget, time.perf_counter_ns).run(corpus)
    usual, longest, removals = [], [], []
    for _ in range(rounds):
        corpus.add_external("text", documents)
        before = [next(batches) for _ in range(CALLS_BEFORE)]
        span: list[float] = []

        def remove(span: list[float] = span) -> None:
            span.append(time.perf_counter())
            corpus.remove_external("text")
            span.append(time.perf_counter())

        thread = threading.Thread(target=remove)
        thread.start()
        during = [next(batches)]
        while thread.is_alive() or time.perf_counter() < span[1] + SECONDS_AFTER:
            during.append(next(batches))
        thread.join()
        usual += before
        longest.append([max(kind) for kind in zip(*during, strict=True)])
        removals.append(span[1] - span[0])
    proposes, extends = zip(*usual, strict=True)
    longest_propose, longest_extend = (
        statistics.median(kind) for kind in zip(*longest, strict=True)
    )
    propose_ratio = longest_propose / statistics.median(proposes)
    extend_ratio = longest_extend / statistics.median(extends)
    title = "removal of 1M in another thread"
    return [
        row(f"{title}: takes", statistics.median(removals) * 1e3, "ms"),
        row(f"{title}: longest call", max(longest_propose, longest_extend) / 1e6, "ms"),
        row(f"{title}: longest propose", propose_ratio, "x median", LONGEST, at_most=True),
        row(f"{title}: longest extend", extend_ratio, "x median", LONGEST, at_most=True),
        row("without removal: propose, p99.9", tail_ratio(proposes), "x median"),
        row("without removal: extend, p99.9", tail_ratio(extends), "x median"),
    ]


def removal_here_rows(
    calls: list[Call], budget: int, documents: list[NDArray[np.int32]], rounds: int
) -> list[Row]:
    """CPU time: the removal between two batches makes that step longer."""
    corpus = Corpus()
    batches = Batches(calls, budget, cpu_clock).run(corpus)
    usual, steps, later = [], [], []
    for _ in range(rounds):
        corpus.add_external("text", documents)
        usual += [sum(next(batches)) for _ in range(CALLS_BEFORE)]
        start = cpu_clock()
        corpus.remove_external("text")
        removal = cpu_clock() - start
        steps.append(removal + sum(next(batches)))
        later.append(max(sum(next(batches)) for _ in range(CALLS_BEFORE)))
    median = statistics.median(usual)
    step = statistics.median(steps)
    title = "removal of 1M in the same thread"
    return [
        row(f"{title}: step", step / 1e6, "ms"),
        row(f"{title}: step", step / median, "x median", LONGEST, at_most=True),
        row(
            f"{title}: longest step after",
            statistics.median(later) / median,
            "x median",
            LONGEST,
            at_most=True,
        ),
    ]
