"""What a proposal costs, the Python call included, in the middle of a run."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import numpy as np
from drafters.corpus import CorpusDrafter
from replaying import replay
from table import Row, row
from traces import Trace

from corpus_bench.call_script import documents_of
from corpus_bench.settings import Settings
from corpus_bench.timed_drafter import TimedDrafter
from corpus_bench.timing import no_garbage_collection
from ngram_native import Corpus

HELD = 1_000_000
"""Tokens in the corpus at least, before the first timed call."""

BARS = {1: 5.0, 64: 2.5, 256: 2.5}  # us per request at 8 nodes, by batch


def proposing_rows(settings: Settings) -> list[Row]:
    trace = settings.longest_trace
    earlier, later = halves(trace)
    rows = []
    for batch, bar in BARS.items():
        times = propose_times(settings, earlier, later, batch)
        if (batch, 16) not in times:
            print(f"propose, batch {batch}: skipped, {trace.name} has too few responses")
            continue
        rows.append(
            row(
                f"propose, 8 nodes, batch {batch}", times[batch, 8], "us/request", bar, at_most=True
            )
        )
        ratio = times[batch, 16] / times[batch, 8]
        rows.append(
            row(f"propose, 16 to 8 nodes, batch {batch}", ratio, "ratio", 1.5, at_most=True)
        )
    cold = propose_times(settings, earlier, later, 64, cold_bytes=64 << 20)
    if (64, 8) in cold:
        rows.append(row("propose, 8 nodes, batch 64, caches cold", cold[64, 8], "us/request"))
    return rows


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The steps up to the middle, and the rest."""
    middle = len(trace.steps) // 2
    return replace(trace, steps=trace.steps[:middle]), replace(trace, steps=trace.steps[middle:])


def propose_times(
    settings: Settings, earlier: Trace, later: Trace, batch: int, *, cold_bytes: int = 0
) -> dict[tuple[int, int], float]:
    """Microseconds per request by (batch, budget): the median over the calls that are full.

    The corpus holds other prompts' rollouts and the first half of the trace; the second half is
    replayed, so that every query is another one.
    """
    corpus = Corpus()
    fill_with_others(corpus, earlier, HELD, settings.seed)
    drafter = CorpusDrafter()
    drafter.corpus = corpus
    replay(earlier, drafter, budget=8, active=64)
    step = list(itertools.chain.from_iterable(later.steps))
    if batch == 1:
        step = step[:: len(step) // (10 if settings.quick else 40) or 1]
    elif cold_bytes or settings.quick:
        step = step[: 2 * batch]
    timed = TimedDrafter(corpus, [8, 16], cold_bytes=cold_bytes)
    with no_garbage_collection():
        replay(replace(later, steps=[step]), timed, budget=16, active=batch)
    return {
        key: statistics.median(samples) / key[0] / 1e3
        for key, samples in timed.samples.items()
        if key[0] == batch and len(samples) >= 5
    }


def fill_with_others(corpus: Corpus, trace: Trace, num_tokens: int, seed: int) -> None:
    """Insert at least so many tokens that are as regular as the trace's but others: its responses
    with the vocabulary shuffled, anew in each round."""
    rng = np.random.default_rng(seed)
    size = 1 + max(int(response.max()) for response in trace.responses)
    count = len(list(itertools.chain.from_iterable(trace.steps)))
    shuffled = np.arange(size, dtype=np.int32)
    for i, document in enumerate(documents_of([trace], first_group=1 << 40)):
        if i % count == 0:
            if corpus.num_tokens >= num_tokens:
                return
            rng.shuffle(shuffled)
        corpus.insert(shuffled[document.tokens], group=document.group)
