"""Many threads at once, and a fork in their midst."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from ngram_native import Corpus
from tests.helpers.in_fork import in_fork

I32, I64 = np.int32, np.int64


def work(corpus, worker):
    rng = np.random.default_rng(worker)
    ids = np.array([worker * 10, worker * 10 + 1], I64)
    for sequence_id in ids:
        corpus.open(int(sequence_id), worker % 2, rng.integers(0, 5, 50).astype(I32))
    for step in range(150):
        proposal = corpus.propose(ids, np.array([8, 63], I32), 0.0)
        assert np.diff(proposal.offsets_B1)[0] <= 8
        corpus.extend(ids, rng.integers(0, 5, 6).astype(I32), np.array([0, 2, 6], I64))
        corpus.insert(rng.integers(0, 5, 100).astype(I32), group=worker)
        if step % 20 == worker % 20:
            corpus.set_weight_version(step)
            corpus.add_external(f"{worker}-{step}", [rng.integers(0, 5, 50).astype(I32)])
            corpus.check_integrity()
            corpus.remove_external(f"{worker}-{step}")
        assert corpus.num_tokens > 0
        assert corpus.counters()["live_tokens"] > 0
    for sequence_id in ids:
        corpus.close(int(sequence_id))


def test_threads_share_one_corpus():
    corpus = Corpus(max_bytes=256 << 10)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(partial(work, corpus), range(6)))
    assert corpus.counters()["open_sequences"] == 0
    corpus.check_integrity()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_finds_the_corpus_whole():
    corpus = Corpus(max_bytes=16 << 20)
    tokens = np.random.default_rng(0).integers(0, 50, 300_000).astype(I32)
    stop = threading.Event()

    def keep_inserting():  # one call after another, so that a fork comes in the middle of one
        while not stop.is_set():
            corpus.insert(tokens)

    def use_it() -> None:
        corpus.check_integrity()
        corpus.insert(np.arange(100, dtype=I32))
        corpus.query(0, np.arange(10, dtype=I32), 8, 0.0)

    thread = threading.Thread(target=keep_inserting)
    thread.start()
    try:
        for _ in range(4):
            assert in_fork(use_it) == 0
    finally:
        stop.set()
        thread.join()
