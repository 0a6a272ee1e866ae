"""Many threads at once, and a fork in their midst."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from ngram_native import Corpus
from tests.helpers.in_fork import in_fork

I32, I64 = np.int32, np.int64


def work(corpus, worker, errors, stop, rounds=150):
    rng = np.random.default_rng(worker)
    try:
        ids = np.array([worker * 10, worker * 10 + 1], I64)
        for sequence_id in ids:
            corpus.open(int(sequence_id), worker % 2, rng.integers(0, 5, 50).astype(I32))
        for step in range(rounds):
            if stop.is_set():
                return
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
    except BaseException as error:
        errors.append(error)


def start(corpus, rounds=150):
    errors, stop = [], threading.Event()
    threads = [
        threading.Thread(target=work, args=(corpus, worker, errors, stop, rounds))
        for worker in range(6)
    ]
    for thread in threads:
        thread.start()
    return threads, errors, stop


def test_threads_share_one_corpus():
    corpus = Corpus(max_bytes=256 << 10)
    threads, errors, _ = start(corpus)
    for thread in threads:
        thread.join()
    assert errors == []
    assert corpus.counters()["open_sequences"] == 0
    corpus.check_integrity()


def test_other_threads_run_while_a_call_does():
    corpus = Corpus(max_bytes=64 << 20)
    tokens = np.random.default_rng(0).integers(0, 50_000, 3_000_000).astype(I32)
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    corpus.insert(tokens)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert sum(begin < t < end for t in ticks) > 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_finds_the_corpus_whole():
    corpus = Corpus(max_bytes=16 << 20)
    tokens = np.random.default_rng(0).integers(0, 50, 300_000).astype(I32)
    stop = threading.Event()

    def insert():  # one call after another, so that a fork comes in the middle of one
        while not stop.is_set():
            corpus.insert(tokens)

    def use_it() -> None:
        corpus.check_integrity()
        corpus.insert(np.arange(100, dtype=I32))
        corpus.query(0, np.arange(10, dtype=I32), 8, 0.0)

    thread = threading.Thread(target=insert)
    thread.start()
    try:
        for _ in range(4):
            assert in_fork(use_it) == 0
    finally:
        stop.set()
        thread.join()
