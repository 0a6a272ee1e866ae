"""Saving, loading and forgetting two million tokens."""

from __future__ import annotations

import tempfile
from pathlib import Path

from table import Row, row

from corpus_bench.call_script import documents_of, interleave
from corpus_bench.memory import fill
from corpus_bench.settings import Settings
from corpus_bench.timing import cpu_seconds, no_garbage_collection, wall_seconds
from ngram_native import Corpus


def persistence_rows(settings: Settings) -> list[Row]:
    corpus, again = Corpus(), Corpus()
    calls = interleave(
        documents_of(settings.traces),
        num_tokens=400_000 if settings.quick else 2_000_000,
        active=settings.active,
        seed=settings.seed,
    )
    fill(corpus, calls)
    tokens = corpus.num_tokens
    with tempfile.TemporaryDirectory() as folder, no_garbage_collection():
        path = Path(folder) / "corpus"
        save_wall = wall_seconds(lambda: corpus.save(path))
        save_cpu = cpu_seconds(lambda: corpus.save(path))
        load_cpu = cpu_seconds(lambda: again.load(path))
        load_wall = wall_seconds(lambda: again.load(path))
        size = path.stat().st_size
    again.check_integrity()
    reset = wall_seconds(corpus.reset)
    return [
        row("save, CPU time", save_cpu * 1e3, "ms"),
        row("save, until it is on the disk", save_wall * 1e3, "ms"),
        row("save, file", size / tokens, "bytes/token"),
        row("load, CPU time", load_cpu * 1e3, "ms"),
        row("load, wall time", load_wall * 1e3, "ms"),
        row("reset", reset * 1e3, "ms", 350, at_most=True),
    ]
