"""External corpora that come and go while everything else goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ngram_native import Corpus
from rollout.engine.draft_corpus import ExternalState
from spec_workers.corpus.external_load import ExternalLoad
from spec_workers.corpus.external_loader import ExternalLoader
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.in_fork import in_fork

I32 = np.int32
ROOT = str(Path(__file__).resolve().parents[2])


def i32(*tokens):
    return np.array(tokens, I32)


@pytest.fixture
def corpus():
    corpus = Corpus(max_bytes=1 << 20, max_external_bytes=256 << 20)
    yield corpus
    corpus.check_integrity()


@pytest.fixture
def loads(corpus):
    loads = ExternalLoader(corpus, max_tokens=10_000_000)
    yield loads
    loads.close()


def drafted(corpus, *context):
    return corpus.query(0, i32(*context), 8, 0.0).tokens_N.tolist()


class Gated:
    """Documents whose batches after the first, or an error, come when the gate opens."""

    def __init__(self, *batches, error=None):
        self.batches, self.error = batches, error
        self.gate, self.begun, self.closed = threading.Event(), threading.Event(), False

    def __iter__(self):
        try:
            for batch in self.batches:
                yield batch
                self.begun.set()
                assert self.gate.wait(HANG_SECONDS)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def test_load_is_read_built_and_published_whole(corpus, loads):
    documents = Gated([i32(1, 2, 3)], [i32(1, 2, 4), i32(5)])
    loads.start("a", documents, fraction_read=lambda: 0.5)
    assert documents.begun.wait(HANG_SECONDS)
    time.sleep(0.01)
    assert loads.publish() == []
    (status,) = loads.statuses()
    assert (status.name, status.state, status.num_tokens) == ("a", ExternalState.LOADING, 3)
    assert status.progress == pytest.approx(0.45)
    assert status.num_bytes > 0
    assert loads.wait("a", 0.01).state == "loading"
    documents.gate.set()
    status = loads.wait("a", HANG_SECONDS)
    assert (status.state, status.num_tokens, status.progress) == ("ready", 7, 1.0)
    assert drafted(corpus, 1, 2) == []  # nothing of it is seen before it is published
    assert corpus.external_names() == []
    assert loads.publish() == ["a"]
    assert loads.publish() == []
    assert sorted(drafted(corpus, 1, 2)) == [3, 4]
    (status,) = loads.statuses()
    assert (status.state, status.num_tokens, status.error) == ("published", 7, None)
    assert status.num_bytes == corpus.counters()["external_bytes"]
    loads.remove("a")
    assert loads.statuses() == []
    assert drafted(corpus, 1, 2) == []


def test_several_load_at_once_and_the_rest_wait_their_turn(corpus):
    loads = ExternalLoader(corpus, max_tokens=1000, max_loading=2)
    gated = {name: Gated([i32(1, 2, 3)]) for name in "cab"}
    for name, documents in gated.items():
        loads.start(name, documents)
    assert gated["c"].begun.wait(HANG_SECONDS)
    assert gated["a"].begun.wait(HANG_SECONDS)
    assert not gated["b"].begun.wait(0.05)
    assert [s.state for s in loads.statuses()] == ["loading"] * 3
    assert [s.progress for s in loads.statuses()] == [None] * 3  # nobody told how long they are
    gated["c"].gate.set()
    assert gated["b"].begun.wait(HANG_SECONDS)
    gated["a"].gate.set()
    gated["b"].gate.set()
    for name in gated:
        assert loads.wait(name, HANG_SECONDS).state == "ready"
    assert loads.publish() == ["a", "b", "c"]
    loads.close()
    assert corpus.external_names() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ((OSError, "line 7: no text"), "line 7: no text"),
        ((KeyError,), "KeyError"),
        ([[i32(1, 2)], [i32(3, -1)]], r"tokens[1]=-1"),
        ([[np.zeros(3)]], "documents[0]=<array of float64>"),
        ([[np.zeros(101, I32)]], "max_tokens=100"),
        ([[np.zeros(60, I32)]] * 2, "max_tokens=100"),
        (None, "not iterable"),
    ],
)
def test_failed_load_leaves_nothing(corpus, batches, message):
    loads = ExternalLoader(corpus, max_tokens=100)
    if isinstance(batches, tuple):
        error, *arguments = batches
        batches = Gated([i32(1)], error=error(*arguments))
        batches.gate.set()
    loads.start("bad", batches)
    status = loads.wait("bad", HANG_SECONDS)
    assert status.state == "failed"
    assert message in status.error
    assert (status.num_tokens, status.num_bytes, status.progress) == (0, 0, None)
    assert loads.publish() == []
    assert corpus.counters()["external_bytes"] == 0
    loads.start("bad", [[i32(1, 2, 3)]])  # a failed name may be used again
    assert loads.wait("bad", HANG_SECONDS).state == "ready"
    assert loads.publish() == ["bad"]
    loads.close()


def test_tokens_and_bytes_are_bounded_over_all(corpus):
    loads = ExternalLoader(corpus, max_tokens=100)
    corpus.add_external("direct", [np.zeros(40, I32)])
    loading = Gated([np.zeros(30, I32)])
    loads.start("loading", loading)
    assert loading.begun.wait(HANG_SECONDS)
    loads.start("over", [[np.zeros(31, I32)]])
    assert "beside the 70 of other" in loads.wait("over", HANG_SECONDS).error
    loads.start("fits", [[np.zeros(30, I32)]])
    assert loads.wait("fits", HANG_SECONDS).state == "ready"
    loads.remove("over")
    loading.gate.set()
    loads.wait("loading", HANG_SECONDS)
    assert loads.publish() == ["fits", "loading"]
    loads.close()

    small = Corpus(max_bytes=1 << 20, max_external_bytes=1 << 20)
    loads = ExternalLoader(small, max_tokens=10**9)
    loads.start("documents", [[np.zeros(60_000, I32)]] * 5)
    assert "max_external_bytes=1048576" in loads.wait("documents", HANG_SECONDS).error
    loads.start("index", [[np.zeros(200_000, I32)]])
    assert "max_external_bytes=1048576" in loads.wait("index", HANG_SECONDS).error
    assert small.counters()["external_bytes"] == 0
    loads.close()


def test_names_are_taken_until_removed(corpus, loads):
    loading = Gated([i32(1)])
    loads.start("loading", loading)
    loads.start("ready", [[i32(1)]])
    loads.wait("ready", HANG_SECONDS)
    corpus.add_external("published", [])
    for name in ("loading", "ready", "published"):
        with pytest.raises(ValueError, match=f"name='{name}': is {name}"):
            loads.start(name, [])
        loads.remove(name)
        loads.start(name, [[i32(2)]])
    for call in (loads.remove, loads.wait):
        with pytest.raises(ValueError, match="name='none'"):
            call("none")
    for name in (3, "half \ud800"):
        with pytest.raises(ValueError, match=f"name={re.escape(repr(name))}: .*must be"):
            loads.start(name, [])
    loading.gate.set()


def test_name_taken_behind_a_loads_back_fails_it(corpus, loads):
    loads.start("a", [[i32(1, 2, 3)]])
    loads.wait("a", HANG_SECONDS)
    corpus.add_external("a", [i32(7, 8, 9)])
    assert loads.publish() == []
    (status,) = loads.statuses()
    assert (status.name, status.state, status.num_tokens) == ("a", "published", 3)
    assert "name='a'" in status.error
    assert drafted(corpus, 7, 8) == [9]
    assert loads.wait("a", HANG_SECONDS) == status
    loads.remove("a")  # both
    assert loads.statuses() == []
    assert corpus.external_names() == []


def test_one_on_request_is_published_by_name_alone(corpus, loads):
    late = Gated([i32(1, 2, 3)], [i32(4)])
    loads.start("late", late, on_request=True)
    with pytest.raises(ValueError, match=r"name='late': is loading; wait\(\) for it first"):
        loads.publish_one("late")
    loads.start("soon", [[i32(5, 6, 7)]])
    loads.start("bad", [[i32(-1)]], on_request=True)
    late.gate.set()
    assert [loads.wait(each, HANG_SECONDS).state for each in ("bad", "late", "soon")] == [
        "failed", "ready", "ready",
    ]  # fmt: skip
    assert loads.publish() == ["soon"]
    assert loads.publish() == []
    assert drafted(corpus, 1, 2) == []
    for _ in range(2):  # the second time it is published
        loads.publish_one("late")
        assert drafted(corpus, 1, 2) == [3]
    with pytest.raises(ValueError, match=r"name='bad': has failed: .*tokens"):
        loads.publish_one("bad")
    with pytest.raises(ValueError, match="name='other': is not loaded"):
        loads.publish_one("other")
    loads.start("unwanted", [[i32(8)]], on_request=True)
    assert loads.wait("unwanted", HANG_SECONDS).state == "ready"
    loads.remove("unwanted")
    assert [each.name for each in loads.statuses()] == ["bad", "late", "soon"]


@pytest.mark.parametrize("error", [TypeError, MemoryError])
def test_what_cannot_be_published_fails_alone(corpus, loads, monkeypatch, error):
    for name in ("bad", "good"):
        loads.start(name, [[i32(1, 2, 3)]])
        loads.wait(name, HANG_SECONDS)
    real = corpus.publish_external

    def publish_external(name, builder):
        if name == "bad":
            raise error
        real(name, builder)

    monkeypatch.setattr(corpus, "publish_external", publish_external)
    assert loads.publish() == ["good"]
    bad, good = loads.statuses()
    assert (bad.state, bad.error) == ("failed", error.__name__)
    assert good.state == "published"
    assert loads.publish() == []


def test_publishing_does_not_wait_for_a_build(corpus):
    builder = corpus.external_builder()
    tokens = np.random.default_rng(0).integers(0, 50_000, 2_000_000).astype(I32)
    builder.append(tokens, np.array([0, len(tokens)]))
    indexing, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=builder.build, args=(lambda: indexing.set() or go_on.wait(HANG_SECONDS),)
    )
    thread.start()
    try:
        assert indexing.wait(HANG_SECONDS)
        with pytest.raises(ValueError, match="builder=not built"):
            corpus.publish_external("a", builder)
    finally:
        go_on.set()
        thread.join()
    corpus.publish_external("a", builder)
    assert corpus.external_names() == ["a"]


def test_cancelled_load_closes_its_documents_and_frees_its_name(corpus, loads):
    documents = Gated([i32(1)], [i32(2)])
    loads.start("a", documents)
    assert documents.begun.wait(HANG_SECONDS)
    loads.remove("a")
    assert loads.statuses() == []
    documents.gate.set()
    loads.start("a", [[i32(5, 6)]])
    assert loads.wait("a", HANG_SECONDS).num_tokens == 2
    loads.close()
    assert documents.closed
    assert corpus.counters()["external_bytes"] == 0  # closing forgets what is not published
    with pytest.raises(ValueError, match="close"):
        loads.start("b", [])


def test_waiting_load_is_cancelled_without_being_read(corpus):
    loads = ExternalLoader(corpus, max_tokens=100, max_loading=1)
    first, read = Gated([i32(1)]), []
    loads.start("first", first)
    loads.start("second", (read.append(1) for _ in range(1)))
    loads.remove("second")
    first.gate.set()
    assert loads.wait("first", HANG_SECONDS).state == "ready"
    loads.close()
    assert read == []


def test_build_is_cancelled_in_the_middle(corpus, loads, monkeypatch):
    indexing, may_continue = threading.Event(), ExternalLoad._may_continue

    def wait_until_cancelled(load):
        if load._is_read:
            indexing.set()
            assert load._cancelled.wait(HANG_SECONDS)
        return may_continue(load)

    monkeypatch.setattr(ExternalLoad, "_may_continue", wait_until_cancelled)
    loads.start("large", [[np.zeros(1_000_000, I32)]])
    assert indexing.wait(HANG_SECONDS)
    (load,) = loads._loads.values()
    loads.close()
    assert load.state is ExternalState.FAILED  # it was not built to its end
    assert corpus.counters()["external_bytes"] == 0


def test_threads_load_publish_and_remove(corpus):
    loads = ExternalLoader(corpus, max_tokens=10**6, max_loading=3)

    def work(worker):
        rng = np.random.default_rng(worker)
        for turn in range(40):
            name = f"{worker}-{turn}"
            loads.start(name, ([rng.integers(0, 5, 50).astype(I32)] for _ in range(3)))
            if turn % 3:
                loads.wait(name, HANG_SECONDS)
            loads.publish()
            assert name in {status.name for status in loads.statuses()}
            corpus.query(0, i32(1, 2), 8, 0.0)
            loads.remove(name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert loads.statuses() == []
    loads.close()
    assert corpus.external_names() == []
    assert corpus.counters()["external_bytes"] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_loading_finds_the_corpus_whole(corpus, loads):
    loads.start("a", [[np.zeros(100_000, I32)]] * 20)

    def use_it() -> None:
        corpus.check_integrity()
        corpus.add_external("child", [i32(1, 2, 3)])
        assert drafted(corpus, 1, 2) == [3]

    assert in_fork(use_it) == 0
    assert loads.wait("a", HANG_SECONDS).state == "ready"


FORKED = """
import os, threading
import numpy as np
from ngram_native import Corpus
from spec_workers.corpus.external_loader import ExternalLoader
from tests.helpers.hang import HANG_SECONDS

gate, begun = threading.Event(), threading.Event()

def documents():
    yield [np.arange(9, dtype=np.int32)]
    begun.set()
    assert gate.wait(HANG_SECONDS)

corpus = Corpus(max_bytes=1 << 20)
loads = ExternalLoader(corpus, max_tokens=100, max_loading=1)
loads.start("ready", [[np.arange(9, dtype=np.int32)]])
loads.wait("ready")
loads.start("loading", documents())
loads.start("waiting", [[np.arange(5, dtype=np.int32)]])
assert begun.wait(HANG_SECONDS)
with loads._changed:  # as another thread may hold it at the wrong moment
    child = os.fork()
if child == 0:
    fails = [status for status in loads.statuses() if status.name != "ready"]
    assert [status.state for status in fails] == ["failed", "failed"]
    assert all("forked" in status.error for status in fails)
    assert loads.publish() == ["ready"]
    for name in ("loading", "waiting"):
        loads.start(name, [[np.arange(5, dtype=np.int32)]])
        assert loads.wait(name, HANG_SECONDS).state == "ready"
    assert loads.publish() == ["loading", "waiting"]
    loads.remove("ready")
    loads.close()
    corpus.check_integrity()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
gate.set()
assert loads.wait("waiting", HANG_SECONDS).state == "ready"
assert loads.publish() == ["loading", "ready", "waiting"]
loads.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_loads_anew():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True, text=True, timeout=HANG_SECONDS, cwd=ROOT,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")


ENDLESS = """
import itertools, sys, time
import numpy as np
from ngram_native import Corpus
from spec_workers.corpus.external_loader import ExternalLoader

loads = ExternalLoader(Corpus(max_external_bytes=1 << 30), max_tokens=10**9, max_loading=2)
loads.start("endless", (time.sleep(0.01) or [np.zeros(10, np.int32)] for _ in itertools.count()))
loads.start("large", [[np.zeros(20_000_000, np.int32)]])
loads.start("waits", [[np.zeros(10, np.int32)]])
while loads.statuses()[1].num_tokens == 0:
    time.sleep(0.01)
"""


def test_program_that_ends_without_close_does_not_hang():
    run = subprocess.run(
        [sys.executable, "-c", ENDLESS],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        cwd=ROOT,
    )
    assert run.returncode == 0
    assert run.stderr == ""
