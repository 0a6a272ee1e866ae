"""External corpora that come and go while everything else goes on."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ngram_native import Corpus
from spec_workers.corpus.external_loader import ExternalLoader
from tests.helpers.hang import HANG_SECONDS

I32 = np.int32


def i32(*tokens):
    return np.array(tokens, I32)


@pytest.fixture
def corpus():
    corpus = Corpus(max_bytes=1 << 20, max_external_bytes=256 << 20)
    yield corpus
    corpus.check_integrity()


@pytest.fixture
def loads(corpus):
    loads = ExternalLoader(corpus, max_tokens=100, max_loading=2)
    yield loads
    loads.close()


def drafted(corpus, *context):
    return corpus.query(0, i32(*context), 8, 0.0).tokens_N.tolist()


def loaded(loads, name, *batches, on_request=False):
    """The status of a corpus when it is ready or has failed."""
    loads.start(name, list(batches), on_request=on_request)
    return loads.wait(name, HANG_SECONDS)


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
    assert loads.publish() == []
    (status,) = loads.statuses()
    assert (status.name, status.state, status.num_tokens) == ("a", "loading", 3)
    assert status.progress == pytest.approx(0.45)
    assert status.num_bytes > 0
    assert loads.wait("a", 0.01).state == "loading"
    documents.gate.set()
    status = loads.wait("a", HANG_SECONDS)
    assert (status.state, status.num_tokens, status.progress) == ("ready", 7, 1.0)
    assert drafted(corpus, 1, 2) == []  # nothing of it is seen before it is published
    assert loads.publish() == ["a"]
    assert loads.publish() == []
    assert sorted(drafted(corpus, 1, 2)) == [3, 4]
    (status,) = loads.statuses()
    assert (status.state, status.num_tokens, status.error) == ("published", 7, None)
    assert status.num_bytes == corpus.counters()["external_bytes"]
    loads.remove("a")
    assert loads.statuses() == []
    assert drafted(corpus, 1, 2) == []


def test_several_load_at_once_and_the_rest_wait_their_turn(corpus, loads):
    gated = {name: Gated([i32(1, 2, 3)]) for name in "cab"}
    unread = Gated([i32(1)])
    for name, documents in [*gated.items(), ("d", unread)]:
        loads.start(name, documents)
    assert gated["c"].begun.wait(HANG_SECONDS)
    assert gated["a"].begun.wait(HANG_SECONDS)
    assert not gated["b"].begun.is_set()
    assert [(s.state, s.progress) for s in loads.statuses()] == [("loading", None)] * 4
    loads.remove("d")
    gated["c"].gate.set()
    assert gated["b"].begun.wait(HANG_SECONDS)
    gated["a"].gate.set()
    gated["b"].gate.set()
    for name in gated:
        assert loads.wait(name, HANG_SECONDS).state == "ready"
    assert loads.publish() == ["a", "b", "c"]
    assert corpus.external_names() == ["a", "b", "c"]
    assert not unread.begun.is_set()


def test_failed_load_leaves_nothing(corpus, loads):
    for batches, message in (
        (Gated([i32(1)], error=OSError("line 7: no text")), "line 7: no text"),
        (Gated([i32(1)], error=KeyError()), "KeyError"),
        ([[i32(1, 2)], [i32(3, -1)]], r"tokens[1]=-1"),
        ([[np.zeros(60, I32)]] * 2, "max_tokens=100"),
        (None, "not iterable"),
    ):
        if isinstance(batches, Gated):
            batches.gate.set()
        loads.start("bad", batches)
        status = loads.wait("bad", HANG_SECONDS)
        assert status.state == "failed"
        assert message in status.error
        assert (status.num_tokens, status.num_bytes, status.progress) == (0, 0, None)
        assert loads.publish() == []
        assert corpus.counters()["external_bytes"] == 0
    assert loaded(loads, "bad", [i32(1, 2, 3)]).state == "ready"  # the name may be used again
    assert loads.publish() == ["bad"]


def test_tokens_and_bytes_are_bounded_over_all(corpus, loads):
    corpus.add_external("direct", [np.zeros(40, I32)])
    loading = Gated([np.zeros(30, I32)])
    loads.start("loading", loading)
    assert loading.begun.wait(HANG_SECONDS)
    assert "beside the 70 of other" in loaded(loads, "over", [np.zeros(31, I32)]).error
    assert loaded(loads, "fits", [np.zeros(30, I32)]).state == "ready"
    loading.gate.set()
    loads.wait("loading", HANG_SECONDS)
    assert loads.publish() == ["fits", "loading"]
    small = Corpus(max_bytes=1 << 20, max_external_bytes=1 << 20)
    loads = ExternalLoader(small, max_tokens=10**9)
    for name, batches in (("documents", [[np.zeros(60_000, I32)]] * 5),
                          ("index", [[np.zeros(200_000, I32)]])):  # fmt: skip
        assert "max_external_bytes=1048576" in loaded(loads, name, *batches).error
    assert small.counters()["external_bytes"] == 0
    loads.close()


def test_a_load_on_request_is_published_by_name_alone(corpus, loads):
    late = Gated([i32(1, 2, 3)], [i32(4)])
    loads.start("late", late, on_request=True)
    with pytest.raises(ValueError, match=r"name='late': is loading; wait\(\) for it first"):
        loads.publish_one("late")
    late.gate.set()
    assert loads.wait("late", HANG_SECONDS).state == "ready"
    assert loaded(loads, "soon", [i32(5, 6, 7)]).state == "ready"
    assert loaded(loads, "bad", [i32(-1)], on_request=True).state == "failed"
    assert loads.publish() == ["soon"]
    assert loads.publish() == []
    assert drafted(corpus, 1, 2) == []
    for _ in range(2):  # the second time it is published
        loads.publish_one("late")
        assert drafted(corpus, 1, 2) == [3]
    with pytest.raises(ValueError, match=r"name='bad': has failed: .*tokens"):
        loads.publish_one("bad")
    assert [each.name for each in loads.statuses()] == ["bad", "late", "soon"]


def test_cancelled_load_closes_its_documents_and_frees_its_name(corpus, loads):
    documents = Gated([i32(1)], [i32(2)])
    loads.start("a", documents)
    assert documents.begun.wait(HANG_SECONDS)
    loads.remove("a")
    assert loads.statuses() == []
    documents.gate.set()
    assert loaded(loads, "a", [i32(5, 6)]).num_tokens == 2
    loads.close()
    assert documents.closed
    assert corpus.counters()["external_bytes"] == 0  # closing forgets what is not published
    with pytest.raises(ValueError, match="close"):
        loads.start("b", [])
