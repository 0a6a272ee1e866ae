"""Accept length and price of the n-gram corpus's drafts, and inputs that are hard for it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from corpus_calls import (
    ACTIVE,
    BUDGET,
    Call,
    Document,
    Settings,
    documents_of,
    interleave,
    python_rate,
)
from harness.rows import Row, row
from harness.timing import clock_cost, cpu_clock, cpu_seconds, no_garbage_collection
from harness.traces import SYNTHETIC, Trace, trace_of
from numpy.typing import NDArray
from replaying import CorpusDrafter, Replay, equal_counts, largest_gap, replay

from ngram_native import Corpus, Proposal

SLOWER = 10.0  # hard inputs than ordinary ones, at most

PROPOSE_BARS = {1: 5.0, 64: 2.5, 256: 2.5}  # us per request at 8 nodes, by batch

FLOOR = 0.06
"""Least estimate of a node, where accept length is measured."""

# Least accept length, most nodes drafted.
ACCEPT_BARS = {"gsm_rollouts_t05": (2.9, 7.6), "procedural_groups": (4.6, 6.8)}


class TimedDrafter(CorpusDrafter):
    """Takes turns with the given budgets, whatever it is asked for, so that each of them meets the
    same kind of queries, and none finds in the caches what another has just read."""

    def __init__(self, corpus: Corpus, budgets: Sequence[int]) -> None:
        super().__init__(corpus=corpus)
        self._budgets = itertools.cycle(budgets)
        self._cost = clock_cost()
        self.samples: dict[tuple[int, int], list[int]] = {}  # ns, by batch size and budget

    def ask(self, ids_B: NDArray[np.int64], budget: int) -> Proposal:
        budget = next(self._budgets)
        budgets_B = np.full(len(ids_B), budget, np.int32)
        start = cpu_clock()
        proposal = self.corpus.propose(ids_B, budgets_B, 0.0)
        nanoseconds = cpu_clock() - start - self._cost
        self.samples.setdefault((len(ids_B), budget), []).append(nanoseconds)
        return proposal


def proposing_rows(settings: Settings) -> Iterator[Row]:
    """The price of a proposal, the Python call included, in the middle of a run."""
    for batch, bar in PROPOSE_BARS.items():
        times = propose_times(settings, batch)
        if len(times) < 2:
            print(f"propose, batch {batch}: skipped, the trace has too few responses")
            continue
        name = f"propose, 8 nodes, batch {batch}"
        yield row(name, times[8], "us/request", bar, at_most=True)
        name = f"propose, 16 to 8 nodes, batch {batch}"
        yield row(name, times[16] / times[8], "ratio", 1.5, at_most=True)


def propose_times(settings: Settings, batch: int) -> dict[int, float]:
    """Microseconds per request by budget: the median over the calls that are full.

    The corpus holds other prompts' rollouts and the first half of the trace; the second half is
    replayed, so that every query is another one.
    """
    trace = settings.longest_trace
    middle = len(trace.steps) // 2
    earlier = replace(trace, steps=trace.steps[:middle])
    corpus = Corpus()
    fill_with_others(corpus, earlier, 1_000_000)
    replay(earlier, CorpusDrafter(corpus=corpus), budget=BUDGET, active=ACTIVE)
    step = list(itertools.chain.from_iterable(trace.steps[middle:]))
    if batch == 1:
        step = step[:: len(step) // (10 if settings.quick else 40) or 1]
    elif settings.quick:
        step = step[: 2 * batch]
    timed = TimedDrafter(corpus, [8, 16])
    with no_garbage_collection():
        replay(replace(trace, steps=[step]), timed, budget=16, active=batch)
    return {
        budget: statistics.median(samples) / size / 1e3
        for (size, budget), samples in timed.samples.items()
        if size == batch and len(samples) >= 5
    }


def fill_with_others(corpus: Corpus, trace: Trace, num_tokens: int) -> None:
    """Insert at least so many tokens that are as regular as the trace's but others: its responses
    with the vocabulary shuffled, anew in each round."""
    rng = np.random.default_rng(0)
    shuffled = np.arange(1 + trace.largest_token, dtype=np.int32)
    count = sum(map(len, trace.steps))
    for i, document in enumerate(documents_of([trace], first_group=1 << 40)):
        if i % count == 0:
            if corpus.num_tokens >= num_tokens:
                return
            rng.shuffle(shuffled)
        corpus.insert(shuffled[document.tokens], group=document.group)


def pathological_rows(settings: Settings) -> Iterator[Row]:
    """Inputs that hurt suffix trees, tries and hash chains, against ordinary ones: interleaved
    sequences of one group, and one document, of a million tokens each."""
    total = 200_000 if settings.quick else 1_000_000
    trace = settings.longest_trace
    calls = interleave(documents_of([trace]), num_tokens=total, active=ACTIVE)
    document = np.concatenate(trace.responses)[:total]
    usual = hard_costs(calls, document, trace, total)
    for name, stream in hard_streams(total).items():
        # One document per sequence: the next part of the stream, and all in one group.
        parts = np.array_split(stream, ACTIVE)
        none = np.empty(0, np.int32)
        documents = [Document(group=0, prompt=none, tokens=part) for part in parts]
        calls = interleave(documents, num_tokens=total, active=ACTIVE)
        hard = trace_of(name, [none], parts, [0] * len(parts), [list(range(len(parts)))])
        for what, cost in hard_costs(calls, stream, hard, total).items():
            yield row(f"{name}: {what}", cost / usual[what], "x ordinary", SLOWER, at_most=True)


def hard_costs(
    calls: list[Call], document: NDArray[np.int32], trace: Trace, limit: int
) -> dict[str, float]:
    """CPU time of a token by `extend` and by `insert`, and of a request by `propose`."""
    corpus = Corpus()
    inserted = cpu_seconds(lambda: corpus.insert(document, group=0))
    return {
        "extend": 1 / python_rate(calls, 0),
        "insert": inserted / len(document),
        "propose": propose_cost(trace, limit),
    }


def propose_cost(trace: Trace, limit: int) -> float:
    """Median CPU time per request of full batches: the ends of the responses, ``limit / 8`` tokens
    in all, are replayed into a corpus that holds the whole trace already."""
    corpus = Corpus()
    for response, tokens in enumerate(trace.responses):
        corpus.insert(tokens, group=int(trace.prompt_of_R[response]))
    share = max(1, limit // 8 // len(trace.responses))
    ends = replace(trace, responses=[tokens[-share:] for tokens in trace.responses])
    timed = TimedDrafter(corpus, [BUDGET])
    with no_garbage_collection():
        replay(ends, timed, budget=BUDGET, active=ACTIVE)
    full = max(timed.samples)
    return statistics.median(timed.samples[full]) / full[0]


def hard_streams(total: int) -> dict[str, NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    shorter, longer = [0], [0, 1]
    while len(longer) < total:
        shorter, longer = longer, longer + shorter
    return {
        "one token": np.full(total, 7, np.int32),
        "Fibonacci word": np.array(longer[:total], np.int32),
        "random tokens": rng.integers(0, 50_000, total, dtype=np.int32),
        "random bits": rng.integers(0, 2, total, dtype=np.int32),
    }


def accept_rows(settings: Settings) -> Iterator[Row]:
    """Accept length on every trace, also by epoch, and its price."""
    for trace in settings.traces:
        least, most = ACCEPT_BARS.get(trace.name, (None, None))
        result = replayed(trace, FLOOR)
        title = f"{trace.name}, {result.drafter}"
        yield row(f"{title}: accept length", result.accept_length, "tokens", least)
        yield row(f"{title}: drafted", result.drafted, "nodes/request", most, at_most=True)
        yield row(f"{title}: propose", result.propose_cost, "us/request")
        yield row(f"{title}: insert", result.insert_cost, "us/token")
        for epoch, length in result.accept_length_by(trace.epoch_of_R).items():
            yield row(f"{title}: epoch {epoch:g}", length, "tokens")


def precision_rows(settings: Settings) -> Iterator[Row]:
    """Estimates of the corpus against what came, no node left out for a low estimate."""
    results = [replayed(trace, 0.0) for trace in settings.traces]
    judged = {each.trace.name: (each.estimates_J, each.accepted_J) for each in results}
    if len(results) > 1:
        every = zip(*judged.values(), strict=True)
        all_estimates_J, all_accepted_J = (np.concatenate(each) for each in every)
        judged["all traces"] = all_estimates_J, all_accepted_J
    for name, (estimates_J, accepted_J) in judged.items():
        # A made-up trace has too few nodes in the middle to learn from.
        bar = None if name == SYNTHETIC else 0.05
        gap = largest_gap(equal_counts(estimates_J), estimates_J, accepted_J)
        name = f"{name}: worst of ten equal bins off by"
        yield row(name, gap, "probability", bar, at_most=True)


def replayed(trace: Trace, floor: float) -> Replay:
    with no_garbage_collection():
        return replay(trace, CorpusDrafter(floor), budget=BUDGET, active=ACTIVE)
