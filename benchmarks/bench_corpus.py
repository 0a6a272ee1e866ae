"""Question: what does the n-gram corpus cost by itself, what does it hold, and how well does it
draft on recorded rollouts?

    python benchmarks/bench_corpus.py [--trace FILE ...] [--quick] [--only memory ...]

Traces are recorded rollouts; without one, one is made up. Every part has its bars: tokens per
second, bytes per token, microseconds per proposal, pauses beside usual calls, accept length and
precision of estimates on the two recorded traces. Times are CPU times with Python's garbage
collector off, except where wall time is what counts: while another thread removes a corpus, and for
the disk. ``peers`` replays other projects' drafters too (`peer_drafters.py`), without bars. To
measure a drafter of your own, call `replaying.replay`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from corpus_calls import Call, Settings, python_rate, real_text
from corpus_drafting import accept_rows, pathological_rows, precision_rows, proposing_rows
from corpus_latency import latency_rows
from harness.command import Command, Parts
from harness.rows import Row, row
from harness.timing import in_fresh_process, no_garbage_collection, wall_seconds
from harness.traces import add_trace_option, load_traces
from peer_drafters import peer_rows

from ngram_native import Corpus

SMALL_BYTES = 32 << 20


def insertion_rows(settings: Settings) -> Iterator[Row]:
    """Interleaved sequences take 1 to 4 tokens each per call, one Python call per step; prompts
    enter by `open`, which is not timed. Nodes proposed before each call, not timed either, are
    judged by its tokens."""
    calls = settings.calls(400_000 if settings.quick else 1_300_000)
    repeats = 3 if settings.quick else 5
    for budget, name in ((0, "insert"), (8, "insert and judge 8 nodes")):
        rate = statistics.median(python_rate(calls, budget) for _ in range(repeats))
        yield row(name, rate, "tokens/s", 4e6)


def memory_rows(settings: Settings) -> Iterator[Row]:
    """Bytes per token by the corpus's own books, the table and open sequences included, at two
    million tokens held and of a smaller corpus that is full; and by the process's."""
    calls = settings.calls(2_000_000)
    corpus, full = filled(Corpus(), calls), filled(Corpus(max_bytes=SMALL_BYTES), calls)
    bars = partial(row, at_most=True)
    held, held_full = (each.num_bytes / each.num_tokens for each in (corpus, full))
    yield bars("memory, 2M tokens, default size", held, "bytes/token", 40)
    yield bars("memory, 32 MiB, full", held_full, "bytes/token", 40)
    yield bars("memory, 32 MiB, full: of its bound", full.num_bytes / SMALL_BYTES, "share", 1)
    growth, external_growth = in_fresh_process(process_growth, 2_000_000)
    yield bars("memory, process growth / num_bytes", growth, "ratio", 1.05)
    yield bars("external, process growth / bytes", external_growth, "ratio", 1.05)


def filled(corpus: Corpus, calls: Sequence[Call]) -> Corpus:
    for call in calls:
        call.prepare(corpus)
        call.extend(corpus)
    return corpus


def process_growth(count: int) -> tuple[float, float]:
    """Growth of resident memory per reported byte, by rollouts and by an external corpus of random
    tokens. Below 1 where memory was reserved and never touched."""
    tokens = np.random.default_rng(0).integers(0, 50_000, count, dtype=np.int32)
    ids_B, offsets_B1 = np.arange(64), np.arange(65) * 2
    none = np.empty(0, np.int32)
    documents = list(tokens[: count // 2].reshape(-1, 1000))
    process = psutil.Process()
    before = process.memory_info().rss
    corpus = Corpus()
    for sequence_id in ids_B.tolist():
        corpus.open(sequence_id, sequence_id // 8, none)
    for begin in range(0, count, 128):
        corpus.extend(ids_B, tokens[begin : begin + 128], offsets_B1)
    grown = process.memory_info().rss
    reported = corpus.num_bytes
    corpus.add_external("external", documents)
    added = process.memory_info().rss
    external = corpus.counters()["external_bytes"]
    return (grown - before) / reported, (added - grown) / external


def external_rows(settings: Settings) -> Iterator[Row]:
    documents = real_text(1_000_000)
    tokens = sum(map(len, documents))
    print(f"external: {tokens} tokens of text", flush=True)
    rates = []
    for _ in range(3):
        corpus = Corpus()
        with no_garbage_collection():
            start = time.process_time()  # of all threads: the corpus may use others
            corpus.add_external("text", documents)
            rates.append(tokens / (time.process_time() - start))
    size = corpus.counters()
    held = size["external_bytes"] / size["external_tokens"]
    yield row("external, build", statistics.median(rates), "tokens/s", 2e6)
    yield row("external, memory", held, "bytes/token", 64, at_most=True)


def persistence_rows(settings: Settings) -> Iterator[Row]:
    """Seconds to save, load and forget two million tokens."""
    again = Corpus()
    corpus = filled(Corpus(), settings.calls(400_000 if settings.quick else 2_000_000))
    with tempfile.TemporaryDirectory() as folder, no_garbage_collection():
        path = Path(folder) / "corpus"
        save = wall_seconds(lambda: corpus.save(path))
        load = wall_seconds(lambda: again.load(path))
        size = path.stat().st_size
    again.check_integrity()
    yield row("save, until it is on the disk", save * 1e3, "ms")
    yield row("save, file", size / corpus.num_tokens, "bytes/token")
    yield row("load", load * 1e3, "ms")
    yield row("reset", wall_seconds(corpus.reset) * 1e3, "ms", 350, at_most=True)


ROWS = {
    "insert": insertion_rows,
    "memory": memory_rows,
    "external": external_rows,
    "propose": proposing_rows,
    "pathological": pathological_rows,
    "latency": latency_rows,
    "persistence": persistence_rows,
    "accept": accept_rows,
    "precision": precision_rows,
    "peers": peer_rows,
}


def parts(options: argparse.Namespace) -> Parts:
    settings = Settings(traces=load_traces(options.trace), quick=options.quick)
    return {name: partial(rows, settings) for name, rows in ROWS.items()}


def make_command() -> Command:
    command = Command(__doc__)
    add_trace_option(command)
    return command


if __name__ == "__main__":
    make_command().run("n-gram corpus", parts)
