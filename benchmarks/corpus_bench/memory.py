"""Bytes held per token, by the corpus's own books and by the process's."""

from __future__ import annotations

import numpy as np
import psutil
from table import Row, row

from corpus_bench.call_script import Call, documents_of, interleave
from corpus_bench.fresh_process import in_fresh_process
from corpus_bench.settings import Settings
from ngram_native import Corpus

TOKENS = 2_000_000
SMALL = 32 << 20


def memory_rows(settings: Settings) -> list[Row]:
    """At two million tokens held, the table and open sequences included; and of a smaller corpus
    that is full."""
    # Prompts come on top of the extends, so that this ends a little above.
    calls = interleave(
        documents_of(settings.traces), num_tokens=TOKENS, active=settings.active, seed=settings.seed
    )
    corpus, full = Corpus(), Corpus(max_bytes=SMALL)
    fill(corpus, calls)
    fill(full, calls)
    held = corpus.num_bytes / corpus.num_tokens
    held_full = full.num_bytes / full.num_tokens
    growth, external_growth = in_fresh_process(process_growth, settings.seed)
    return [
        row("memory, 2M tokens, default size", held, "bytes/token", 40, at_most=True),
        row("memory, 32 MiB, full", held_full, "bytes/token", 40, at_most=True),
        row("memory, 32 MiB, full: of its bound", full.num_bytes / SMALL, "share", 1, at_most=True),
        row("memory, process growth / num_bytes", growth, "ratio", 1.05, at_most=True),
        row("external, process growth / bytes", external_growth, "ratio", 1.05, at_most=True),
    ]


def fill(corpus: Corpus, calls: list[Call]) -> None:
    for call in calls:
        call.prepare(corpus)
        corpus.extend(call.ids_B, call.tokens_N, call.offsets_B1)


def process_growth(seed: int) -> tuple[float, float]:
    """How much the resident memory grows per byte reported, by rollouts and by an external corpus
    of random tokens. Below 1 where memory was reserved and never touched."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, TOKENS, dtype=np.int32)
    ids_B, offsets_B1 = np.arange(64), np.arange(65) * 2
    none = np.empty(0, np.int32)
    documents = list(tokens[: TOKENS // 2].reshape(-1, 1000))
    process = psutil.Process()
    before = process.memory_info().rss
    corpus = Corpus()
    for sequence_id in ids_B.tolist():
        corpus.open(sequence_id, sequence_id // 8, none)
    for begin in range(0, TOKENS, 128):
        corpus.extend(ids_B, tokens[begin : begin + 128], offsets_B1)
    filled = process.memory_info().rss
    reported = corpus.num_bytes
    corpus.add_external("external", documents)
    added = process.memory_info().rss
    external = corpus.counters()["external_bytes"]
    return (filled - before) / reported, (added - filled) / external
