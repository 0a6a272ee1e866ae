"""Pauses: the slowest calls of a full corpus against the usual ones, while memory is dropped or
freed. Nothing allocated later keeps the allocator from giving removed memory back to the system:
that is the dear case."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from corpus_calls import ACTIVE, BUDGET, Settings, real_text
from harness.rows import Row, row
from harness.timing import clock_cost, cpu_clock, in_fresh_process

from ngram_native import Corpus
from spec_workers.corpus.external_loader import ExternalLoader

LONGEST = 5.0  # times the median, at most
SMALL = 8 << 20
TOKENS = 1_000_000  # of the external corpus
CALLS_BEFORE = 300
CALLS_AFTER = 20  # where a cost put off would show

Times = tuple[int, int]
"""Nanoseconds of a propose and of an extend."""


def latency_rows(settings: Settings) -> Iterator[Row]:
    for measure in (eviction_rows, removal_elsewhere_rows, removal_here_rows):
        yield from in_fresh_process(measure, settings)


def full_corpus(settings: Settings, clock: Callable[[], int]) -> tuple[Corpus, Iterator[Times]]:
    """A corpus that from here on drops as much as it takes in, and its next calls, timed."""
    corpus = Corpus(max_bytes=SMALL)
    calls = settings.calls(900_000 if settings.quick else 1_500_000)
    budgets_B = np.full(ACTIVE, BUDGET, np.int32)
    cost = clock_cost() if clock is cpu_clock else 0

    def timed() -> Iterator[Times]:
        for call in calls:
            call.prepare(corpus)
            start = clock()
            corpus.propose(call.ids_B, budgets_B, 0.0)
            proposed = clock()
            call.extend(corpus)
            yield proposed - start - cost, clock() - proposed - cost

    times = timed()
    while corpus.counters()["dropped_tokens"] == 0:
        next(times)
    return corpus, times


def num_rounds(settings: Settings) -> int:
    return 3 if settings.quick else 11


def at_most(name: str, value: float, bar: float | None = LONGEST) -> Row:
    return row(name, value, "x median", bar, at_most=True)


def eviction_rows(settings: Settings) -> list[Row]:
    """CPU time of calls that evict."""
    _, times = full_corpus(settings, cpu_clock)
    rows = []
    for name, samples in zip(("propose", "extend"), zip(*times, strict=True), strict=True):
        median = float(np.median(samples))
        rows.append(row(f"evicting: {name}", median / 1e3, "us/call"))
        tail = float(np.quantile(samples, 0.999)) / median
        rows.append(at_most(f"evicting: {name}, p99.9", tail))
    return rows


def removal_elsewhere_rows(settings: Settings) -> list[Row]:
    """Wall time, since what may hurt is a lock held. The median over rounds, since the machine may
    be busy with others in some of them; as many calls without a removal tell how busy it is."""
    documents = real_text(TOKENS)
    corpus, times = full_corpus(settings, time.perf_counter_ns)
    usual: list[Times] = []
    longest, longest_usual = [], []
    for _ in range(num_rounds(settings)):
        corpus.add_external("text", documents)
        before = [next(times) for _ in range(CALLS_BEFORE)]
        thread = threading.Thread(target=corpus.remove_external, args=("text",))
        thread.start()
        during = [next(times)]
        while thread.is_alive():
            during.append(next(times))
        thread.join()
        during += [next(times) for _ in range(CALLS_AFTER)]
        usual += before
        longest.append(np.max(during, axis=0))
        longest_usual.append(np.max(before[-len(during) :], axis=0))
    title, control = "removal of 1M in another thread", "the same without a removal"
    slowest = np.median(longest, axis=0)
    rows = [row(f"{title}: longest call", float(slowest.max()) / 1e6, "ms")]
    medians = np.median(usual, axis=0)
    ratios = zip(slowest / medians, np.median(longest_usual, axis=0) / medians, strict=True)
    for name, (ratio, busy) in zip(("propose", "extend"), ratios, strict=True):
        # Where calls are that long anyway, the machine is too busy to tell.
        bar = LONGEST if busy <= LONGEST else None
        rows.append(at_most(f"{title}: longest {name}", float(ratio), bar))
        rows.append(at_most(f"{control}: longest {name}", float(busy), None))
    return rows


def removal_here_rows(settings: Settings) -> list[Row]:
    """CPU time: the removal between two batches, as an engine does it, makes that step longer."""
    documents = real_text(TOKENS)
    corpus, times = full_corpus(settings, cpu_clock)
    loads = ExternalLoader(corpus, max_tokens=2 * TOKENS)
    steps = map(sum, times)
    usual, removals, slow, later = [], [], [], []
    for _ in range(num_rounds(settings)):
        corpus.add_external("text", documents)
        usual += [next(steps) for _ in range(CALLS_BEFORE)]
        start = cpu_clock()
        loads.remove("text")
        removals.append(cpu_clock() - start)
        slow.append(removals[-1] + next(steps))
        later.append(max(next(steps) for _ in range(CALLS_BEFORE)))
    loads.close()
    title = "removal of 1M in the same thread"
    return [
        row(f"{title}: takes", statistics.median(removals) / 1e6, "ms"),
        at_most(f"{title}: that step", _ratio(slow, usual)),
        at_most(f"{title}: longest step after", _ratio(later, usual)),
    ]


def _ratio(samples: Sequence[int], usual: Sequence[int]) -> float:
    return statistics.median(samples) / statistics.median(usual)
