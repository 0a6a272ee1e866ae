"""An external corpus of real text: building it, and what it takes."""

from __future__ import annotations

import statistics
import time

from table import Row, row

from corpus_bench.settings import Settings
from corpus_bench.text import real_text
from corpus_bench.timing import no_garbage_collection
from ngram_native import Corpus

TOKENS = 1_000_000


def external_rows(settings: Settings) -> list[Row]:
    documents = real_text(settings.external_text, TOKENS)
    tokens = sum(map(len, documents))
    if tokens < TOKENS:
        print(f"external: the text has {tokens} tokens only, of {TOKENS}")
    rates = []
    for _ in range(3):
        corpus = Corpus()
        with no_garbage_collection():
            start = time.process_time()  # of all threads: the corpus may use others
            corpus.add_external("text", documents)
            rates.append(tokens / (time.process_time() - start))
    size = corpus.counters()
    held = size["external_bytes"] / size["external_tokens"]
    return [
        row("external, build", statistics.median(rates), "tokens/s", 2e6),
        row("external, memory", held, "bytes/token", 64, at_most=True),
    ]
