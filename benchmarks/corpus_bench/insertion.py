"""How fast tokens come in, live and group scope, sequences interleaved: 1 to 4 tokens for each of
them per call. Prompts enter by `open`, which is not timed."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
from table import Row, row

from corpus_bench.call_script import Call, documents_of, interleave, num_tokens, write_script
from corpus_bench.native import compile_program, compiler, run_program
from corpus_bench.settings import Settings
from corpus_bench.timing import clock_cost, cpu_clock, no_garbage_collection
from ngram_native import Corpus

MAX_BYTES = 256 << 20
BUDGETS = {0: "insert", 8: "insert and judge 8 nodes"}
"""Nodes proposed before each call, not timed, which its tokens then judge."""


def insertion_rows(settings: Settings) -> list[Row]:
    total = 400_000 if settings.quick else 1_300_000
    repetitions = 3 if settings.quick else 5
    calls = interleave(
        documents_of(settings.traces),
        num_tokens=total,
        active=settings.active,
        seed=settings.seed,
    )
    rows = []
    found = compiler()
    if found is None:
        print("insert, C++ alone: skipped, no C++ compiler")
    else:
        program = compile_program(found)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "calls.bin"
            write_script(calls, script)
            for budget, name in BUDGETS.items():
                runs = run_program(
                    program, script, max_bytes=MAX_BYTES, budget=budget, repetitions=repetitions
                )
                rate = statistics.median(tokens / seconds for tokens, seconds in runs)
                rows.append(row(f"{name}, C++ alone", rate, "tokens/s", 4e6))
    for budget, name in BUDGETS.items():
        rate = statistics.median(python_rate(calls, budget) for _ in range(repetitions))
        rows.append(row(f"{name}, one Python call per step", rate, "tokens/s", 2e6))
    return rows


def python_rate(calls: list[Call], budget: int, max_bytes: int = MAX_BYTES) -> float:
    """Tokens per CPU second through `Corpus.extend`, into a corpus that begins empty."""
    corpus = Corpus(max_bytes=max_bytes)
    nanoseconds = -clock_cost() * len(calls)
    with no_garbage_collection():
        for call in calls:
            call.prepare(corpus)
            if budget > 0:
                corpus.propose(call.ids_B, np.full(len(call.ids_B), budget, np.int32), 0.0)
            start = cpu_clock()
            corpus.extend(call.ids_B, call.tokens_N, call.offsets_B1)
            nanoseconds += cpu_clock() - start
    return num_tokens(calls) / nanoseconds * 1e9
