"""Pauses: the slowest calls against the usual ones, while memory is dropped or freed."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from table import Row, row

from corpus_bench.call_script import Call, documents_of, interleave
from corpus_bench.fresh_process import in_fresh_process
from corpus_bench.settings import Settings
from corpus_bench.text import real_text
from corpus_bench.timing import clock_cost, cpu_clock, tail_ratio
from ngram_native import Corpus
from spec_workers.external_loads import ExternalLoads

LONGEST = 5.0  # times the median, at most
SMALL = 8 << 20
TOKENS = 1_000_000  # of the external corpus
CALLS_BEFORE = 300
CALLS_AFTER = 20  # where a cost put off would show


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
    rows = []
    for measure in (eviction_rows, removal_elsewhere_rows, removal_here_rows):
        rows += in_fresh_process(measure, settings)
    return rows


def make_calls(settings: Settings) -> list[Call]:
    return interleave(
        documents_of(settings.traces),
        num_tokens=900_000 if settings.quick else 1_500_000,
        active=settings.active,
        seed=settings.seed,
    )


def num_rounds(settings: Settings) -> int:
    return 3 if settings.quick else 11


def run_until_full(corpus: Corpus, batches: Iterator[tuple[int, int]]) -> None:
    """From here on the corpus drops as much as it takes in, and its memory no longer grows."""
    while corpus.counters()["dropped_tokens"] == 0:
        next(batches)


def eviction_rows(settings: Settings) -> list[Row]:
    """CPU time of the calls of a full corpus."""
    corpus = Corpus(max_bytes=SMALL)
    batches = Batches(make_calls(settings), settings.budget, cpu_clock).run(corpus)
    run_until_full(corpus, batches)
    proposes, extends = zip(*batches, strict=True)
    return [
        row("evicting: propose", statistics.median(proposes) / 1e3, "us/call"),
        row("evicting: propose, p99.9", tail_ratio(proposes), "x median", LONGEST, at_most=True),
        row("evicting: extend", statistics.median(extends) / 1e3, "us/call"),
        row("evicting: extend, p99.9", tail_ratio(extends), "x median", LONGEST, at_most=True),
    ]


# The corpus of the removals is full, so that nothing allocated later keeps the allocator from
# giving the removed memory back to the system: that is the dear case.


def removal_elsewhere_rows(settings: Settings) -> list[Row]:
    """Wall time, since what may hurt is a lock held. The median over rounds, since the machine may
    be busy with others in some of them; as many calls without a removal tell how busy it is."""
    documents = real_text(settings.external_text, TOKENS)
    corpus = Corpus(max_bytes=SMALL)
    batches = Batches(make_calls(settings), settings.budget, time.perf_counter_ns).run(corpus)
    run_until_full(corpus, batches)
    usual: list[tuple[int, int]] = []
    longest, longest_usual = [], []
    for _ in range(num_rounds(settings)):
        corpus.add_external("text", documents)
        before = [next(batches) for _ in range(CALLS_BEFORE)]
        thread = threading.Thread(target=corpus.remove_external, args=("text",))
        thread.start()
        during = [next(batches)]
        while thread.is_alive():
            during.append(next(batches))
        thread.join()
        during += [next(batches) for _ in range(CALLS_AFTER)]
        usual += before
        longest.append(_longest(during))
        longest_usual.append(_longest(before[-len(during) :]))
    usual_propose, usual_extend = (statistics.median(kind) for kind in zip(*usual, strict=True))
    propose, extend = (statistics.median(kind) for kind in zip(*longest, strict=True))
    busy_propose, busy_extend = (
        statistics.median(kind) for kind in zip(*longest_usual, strict=True)
    )
    # Where calls are that long anyway, the machine is too busy to tell.
    propose_bar = LONGEST if busy_propose <= LONGEST * usual_propose else None
    extend_bar = LONGEST if busy_extend <= LONGEST * usual_extend else None
    if propose_bar is None or extend_bar is None:
        print("latency: the machine is too busy to judge a removal in another thread")
    title, control = "removal of 1M in another thread", "the same without a removal"
    return [
        row(f"{title}: longest call", max(propose, extend) / 1e6, "ms"),
        row(
            f"{title}: longest propose",
            propose / usual_propose,
            "x median",
            propose_bar,
            at_most=True,
        ),
        row(
            f"{title}: longest extend", extend / usual_extend, "x median", extend_bar, at_most=True
        ),
        row(f"{control}: longest propose", busy_propose / usual_propose, "x median"),
        row(f"{control}: longest extend", busy_extend / usual_extend, "x median"),
    ]


def _longest(pairs: list[tuple[int, int]]) -> tuple[int, int]:
    proposes, extends = zip(*pairs, strict=True)
    return max(proposes), max(extends)


def removal_here_rows(settings: Settings) -> list[Row]:
    """CPU time: the removal between two batches, as an engine does it, makes that step longer."""
    documents = real_text(settings.external_text, TOKENS)
    corpus = Corpus(max_bytes=SMALL)
    loads = ExternalLoads(corpus, max_tokens=2 * TOKENS)
    batches = Batches(make_calls(settings), settings.budget, cpu_clock).run(corpus)
    run_until_full(corpus, batches)
    usual, removals, steps, later = [], [], [], []
    for _ in range(num_rounds(settings)):
        corpus.add_external("text", documents)
        usual += [sum(next(batches)) for _ in range(CALLS_BEFORE)]
        start = cpu_clock()
        loads.remove("text")
        removals.append(cpu_clock() - start)
        steps.append(removals[-1] + sum(next(batches)))
        later.append(max(sum(next(batches)) for _ in range(CALLS_BEFORE)))
    loads.close()
    median = statistics.median(usual)
    step, after = statistics.median(steps) / median, statistics.median(later) / median
    title = "removal of 1M in the same thread"
    return [
        row(f"{title}: takes", statistics.median(removals) / 1e6, "ms"),
        row(f"{title}: that step", step, "x median", LONGEST, at_most=True),
        row(f"{title}: longest step after", after, "x median", LONGEST, at_most=True),
    ]
