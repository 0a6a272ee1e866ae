"""Every token enters the corpus once, whatever happens between."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ngram_native import Corpus
from rollout.types import Request
from spec_workers.corpus.feed import CorpusFeed
from tests.helpers.requests import make_request

VOCAB = 1 << 30  # so large that no three tokens come twice by chance


def request_of(rng, request_id, group=None, prompt_len=8) -> Request:
    request = make_request(rng.integers(0, VOCAB, prompt_len).tolist(), request_id=request_id)
    request.group = request_id if group is None else group
    return request


def live_tokens(corpus):
    return int(corpus.counters()["live_tokens"])


class Steps:
    """Steps of a worker: with drafting open or not, some of which fail."""

    def __init__(self, corpus, rng, *, p_open, p_fails, p_update=0.0) -> None:
        self.corpus, self.rng = corpus, rng
        self.feed = CorpusFeed(corpus)
        self.p_open, self.p_fails, self.p_update = p_open, p_fails, p_update
        self.version = self.fed_version = 0

    def step(self, requests, outputs) -> None:
        """``outputs``: what each of them emits, unless the step fails."""
        rng, feed, corpus = self.rng, self.feed, self.corpus
        self.version += rng.random() < self.p_update
        if self.version != self.fed_version:
            feed.catch_up_all()
            self.fed_version = self.version
        corpus.set_weight_version(self.version)
        followed = []
        if rng.random() < self.p_open:
            feed.catch_up(requests)
            followed = [request for request in requests if feed.follows(request)]
            ids = np.array([request.request_id for request in followed], dtype=np.int64)
            proposal = corpus.propose(ids, np.full(ids.size, 8, np.int32), 0.0)
            sizes = np.diff(proposal.offsets_B1).tolist()
        if rng.random() < self.p_fails:
            return
        if followed:
            for request, size in zip(followed, sizes, strict=True):
                feed.note_verified(request, int(rng.integers(0, size + 1)))
        if rng.random() < self.p_fails:
            return
        for request, tokens in zip(requests, outputs, strict=True):
            request.tokens += tokens


@pytest.mark.parametrize(("p_open", "p_fails"), [(0.0, 0.3), (0.1, 0.0), (0.5, 0.3), (1.0, 0.0)])
def test_every_token_enters_once(p_open, p_fails):
    rng = np.random.default_rng(int(100 * p_open + 10 * p_fails))
    corpus = Corpus(max_bytes=4 << 20)
    steps = Steps(corpus, rng, p_open=p_open, p_fails=p_fails, p_update=0.05)
    running, ended, num_ended, made = [], [], 0, 0
    for _ in range(150):
        while len(running) < 5:
            running.append(request_of(rng, made))
            made += 1
        # Some are not in the batch: retracted, or still in their prompt.
        batch = [request for request in running if rng.random() < 0.8]
        steps.step(batch, [rng.integers(0, VOCAB, rng.integers(1, 5)).tolist() for _ in batch])
        for request in [request for request in running if rng.random() < 0.07]:
            running.remove(request)
            emitted = len(request.tokens) > request.prompt_len
            if emitted or steps.feed.follows(request):
                num_ended += len(request.tokens)
                ended.append(request)
            steps.feed.leave(request)
            assert not steps.feed.follows(request)
        corpus.check_integrity()
    steps.feed.catch_up(running)
    ended += running
    assert live_tokens(corpus) == num_ended + sum(len(request.tokens) for request in running)
    for request in ended:
        for place in range(3, len(request.tokens), 7):
            rest = request.tokens[place : place + 8]
            if request in running and place + 8 > len(request.tokens):
                continue
            context = np.array(request.tokens[place - 3 : place], dtype=np.int32)
            assert corpus.query(-1, context, 8, 0.0).tokens_N[: len(rest)].tolist() == rest


def test_a_request_leaves_a_trace_if_it_emitted_or_was_followed():
    rng, corpus = np.random.default_rng(7), Corpus(max_bytes=4 << 20)
    feed = CorpusFeed(corpus)
    first, second = request_of(rng, 1), request_of(rng, 2)
    feed.leave(first)
    assert live_tokens(corpus) == 0
    feed.catch_up([second])
    second.tokens += [4, 5, 6]
    for _ in range(2):  # all of them, once, as before the version changes
        feed.catch_up_all()
        assert live_tokens(corpus) == 8 + 3
    feed.leave(second)
    assert live_tokens(corpus) == 8 + 3
    third = request_of(rng, 3)
    feed.catch_up([third])
    for _ in range(2):
        feed.leave(third)
    assert live_tokens(corpus) == 8 + 3 + 8
    assert corpus.counters()["open_sequences"] == 0


def test_requests_without_room_wait_for_it():
    rng, corpus = np.random.default_rng(9), Corpus(max_bytes=256 << 10)
    feed, room = CorpusFeed(corpus), corpus.max_sequences
    requests = [request_of(rng, request_id) for request_id in range(room + 3)]
    feed.catch_up(requests)
    assert [feed.follows(request) for request in requests] == [True] * room + [False] * 3
    for request in requests:
        request.tokens += rng.integers(0, VOCAB, 4).tolist()
    feed.leave(requests[-1])  # it never had any: it is lost to the corpus, and nothing else is
    assert live_tokens(corpus) == room * 8
    feed.leave(requests[0])
    feed.catch_up(requests[1:-1])
    assert feed.follows(requests[room])
    assert not feed.follows(requests[room + 1])
    assert live_tokens(corpus) == (room + 1) * 12
    corpus.check_integrity()


def test_only_what_was_verified_is_judged():
    """The number of nodes comes once, with the tokens that answer the proposal."""
    calls = []

    class Recording:
        max_sequences = 8

        def open(self, sequence_id, group, tokens) -> None:
            pass

        def close(self, sequence_id) -> None:
            pass

        def extend(self, ids, tokens, offsets, verified) -> None:
            assert tokens.dtype == verified.dtype == np.int32
            assert ids.dtype == offsets.dtype == np.int64
            runs = [tokens[a:b].tolist() for a, b in pairwise(offsets)]
            calls.append(list(zip(ids.tolist(), runs, verified.tolist(), strict=True)))

    feed = CorpusFeed(Recording())
    first, second = make_request([1, 2], request_id=1), make_request([3], request_id=2)
    feed.catch_up([first, second])
    assert calls == []
    feed.note_verified(first, 5)
    first.tokens += [7, 8]
    feed.catch_up([first, second])
    first.tokens += [9]
    second.tokens += [4]
    feed.note_verified(second, 2)
    feed.catch_up([first, second])
    second.tokens += [5]
    feed.leave(second)
    assert calls == [[(1, [7, 8], 5)], [(1, [9], 0), (2, [4], 2)], [(2, [5], 0)]]
