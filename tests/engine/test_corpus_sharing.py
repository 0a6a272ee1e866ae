"""Corpora learn from each other each token once, in any order of senders, within bounds."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from ngram_native import Corpus
from rollout import RolloutEngine, SamplingParams
from rollout.engine.draft_corpus import CorpusDelta
from rollout.errors import InvalidInputError
from rollout.types import Request
from spec_workers.corpus.feed import CorpusFeed
from spec_workers.corpus.inbox import CorpusInbox
from spec_workers.corpus.outbox import CorpusOutbox
from tests.helpers.compared import outcome
from tests.helpers.requests import make_request

VOCAB = 50_000
ALL = 1 << 40


def new_corpus(max_bytes: int = 4 << 20) -> Corpus:
    return Corpus(max_bytes=max_bytes, vocab_size=VOCAB)


def new_inbox(corpus: Corpus, max_bytes: int = 1 << 20) -> CorpusInbox:
    return CorpusInbox(corpus, max_bytes, VOCAB)


class Replica:
    """An engine's requests as its outbox sees them."""

    def __init__(self, seed: int, *, max_bytes: int = 1 << 20, num_groups: int = 3) -> None:
        self.rng = np.random.default_rng(seed)
        self.outbox = CorpusOutbox(max_bytes)
        self.num_groups = num_groups
        self.version = 0
        self.running: list[Request] = []
        self.ended: list[Request] = []

    def begin(self, count: int) -> None:
        for _ in range(count):
            group = int(self.rng.integers(self.num_groups))
            # The prompt is the group's, and the same on every replica.
            prompt = np.random.default_rng(group).integers(0, VOCAB, 12).tolist()
            request_id = len(self.running) + len(self.ended)
            self.running.append(make_request(prompt, request_id=request_id, group=group))

    def step(self, p_end: float = 0.0) -> None:
        """Each request emits some tokens of its group's phrases; some end."""
        self.outbox.follow(self.running)
        for request in list(self.running):
            self.emit(request, int(self.rng.integers(0, 6)))
            if self.rng.random() < p_end:
                self.end(request)

    def emit(self, request: Request, count: int) -> None:
        phrases = np.random.default_rng(100 + request.group).integers(0, VOCAB, 40)
        for _ in range(count):
            at = int(self.rng.integers(40)) if self.rng.random() < 0.1 else len(request.tokens)
            request.tokens.append(int(phrases[at % 40]))
            request.weight_versions.append(self.version)

    def run_alone(self) -> None:
        """One request from its beginning to its end."""
        self.begin(1)
        for _ in range(8):
            self.step()
        self.end(self.running[0])

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.ended.append(request)
        self.outbox.leave(request)


def documents(replicas: list[Replica]) -> list[Request]:
    """The requests that have emitted anything."""
    return [
        request
        for replica in replicas
        for request in replica.ended + replica.running
        if len(request.tokens) > request.prompt_len
    ]


def held_natively(requests: list[Request]) -> Corpus:
    """A corpus whose own engine rolled them out."""
    corpus = new_corpus()
    feed = CorpusFeed(corpus)
    for number, request in enumerate(requests):
        feed.leave(replace(request, request_id=number))
    return corpus


def num_live(corpus: Corpus) -> int:
    return int(corpus.counters()["live_tokens"])


def drafts(corpus: Corpus, context: list[int], group: int) -> dict[tuple[int, ...], float]:
    """Paths of the tree with their estimates; of a tree that was cut, those above the cut."""
    budget = 16
    proposal = corpus.query(group, np.array(context, dtype=np.int32), budget, 0.05)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(proposal.tokens_N, proposal.parents_N, strict=True):
        paths.append((*paths[parent], int(token)))
    found = dict(zip(paths[1:], proposal.probabilities_N.tolist(), strict=True))
    cut = min(found.values()) + 1e-5 if len(found) == budget else 0.0
    return {path: probability for path, probability in found.items() if probability > cut}


def same(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> bool:
    """But for rounding."""
    return one == pytest.approx(other, abs=1e-5)


def contexts(requests: list[Request], rng: np.random.Generator) -> list[tuple[list[int], int]]:
    ends = [int(rng.integers(each.prompt_len, len(each.tokens) + 1)) for each in requests]
    return [(each.tokens[:end], each.group) for each, end in zip(requests, ends, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_pieces_join_into_the_documents_that_were_rolled_out(seed):
    replica, rng = Replica(seed), np.random.default_rng(seed)
    corpus = new_corpus()
    inbox = new_inbox(corpus)
    for _ in range(20):
        replica.begin(int(rng.integers(0, 3)))
        replica.step(p_end=0.2)
        if rng.random() < 0.4:
            inbox.put(replica.outbox.take())
        if rng.random() < 0.4:
            inbox.feed(0, int(rng.integers(1, 40)))
    inbox.put(replica.outbox.take())
    inbox.feed(0, ALL)
    requests = documents([replica])
    expected = held_natively(requests)
    assert num_live(corpus) == num_live(expected)
    assert inbox.learned_tokens == sum(len(r.tokens) - r.prompt_len for r in requests)
    assert inbox.learned_tokens == replica.outbox.shared_tokens
    assert inbox.lost_rollouts == replica.outbox.dropped_rollouts == 0
    for request in requests:  # nothing is left to add of any of them
        before = num_live(corpus)
        corpus.open(10_000, request.group, np.array(request.tokens, dtype=np.int32))
        corpus.close(10_000)
        assert num_live(corpus) == before
    corpus.check_integrity()
    for request in list(replica.running):
        replica.end(request)
    inbox.put(replica.outbox.take())
    inbox.feed(0, ALL)
    assert corpus.counters()["open_sequences"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_senders_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    replicas = [Replica(10 * seed + index) for index in range(3)]
    deltas: list[list[CorpusDelta]] = [[] for _ in replicas]
    for _ in range(4):
        for replica, own in zip(replicas, deltas, strict=True):
            replica.begin(1)
            replica.step(p_end=0.1)
            own.append(replica.outbox.take())
    receivers = []
    for _ in range(3):
        receivers.append(new_corpus())
        inbox = new_inbox(receivers[-1])
        waiting = [list(own) for own in deltas]
        while any(waiting):
            sender = rng.choice([index for index, own in enumerate(waiting) if own])
            inbox.put(waiting[sender].pop(0))
            inbox.feed(0, ALL)
        receivers[-1].check_integrity()
    assert len({num_live(corpus) for corpus in receivers}) == 1
    compared = 0
    for context, group in contexts(documents(replicas), rng):
        one, *others = [drafts(corpus, context, group) for corpus in receivers]
        assert all(same(other, one) for other in others)
        compared += len(one)
    assert compared > 50


def test_tokens_are_as_old_as_the_weights_that_sampled_them():
    """A corpus that went through the updates itself offers the same."""
    replica = Replica(3, num_groups=1)
    replica.begin(4)
    native, taught = new_corpus(), new_corpus()
    feed, inbox = CorpusFeed(native), new_inbox(taught)
    for version in range(4):
        replica.version = version
        native.set_weight_version(version)
        taught.set_weight_version(version)
        inbox.feed(version, ALL)  # it hears of the versions, and of tokens only later
        for _ in range(10):  # 25 tokens of phrases of 40: no context comes often
            replica.step()
        feed.catch_up(replica.running)
    for request in list(replica.running):
        feed.leave(request)
        replica.end(request)
    delta = replica.outbox.take()
    assert np.unique(delta.versions_B).tolist() == [0, 1, 2, 3]
    inbox.put(delta)
    inbox.feed(3, ALL)
    rng = np.random.default_rng(0)
    for context, group in contexts(documents([replica]), rng):
        assert same(drafts(taught, context, group), drafts(native, context, group))
    # The same tokens as those of one policy are worth something else.
    flat = new_corpus()
    plain = new_inbox(flat)
    plain.put(replace(delta, versions_B=np.full_like(delta.versions_B, 3)))
    plain.feed(3, ALL)
    assert any(
        not same(drafts(flat, context, group), drafts(taught, context, group))
        for context, group in contexts(documents([replica]), rng)
    )


def test_an_outbox_that_nobody_empties_drops_the_oldest_rollouts_whole():
    replica = Replica(5, max_bytes=4 * 200)
    for _ in range(30):
        replica.run_alone()
    delta = replica.outbox.take()
    assert replica.outbox.dropped_rollouts > 20
    assert delta.tokens_N.nbytes + delta.context_tokens_M.nbytes <= 4 * 200
    kept = np.unique(delta.rollouts_B).tolist()
    assert kept == list(range(30 - len(kept), 30))
    for b, rollout in enumerate(delta.rollouts_B.tolist()):
        tokens = delta.tokens_N[delta.offsets_B1[b] : delta.offsets_B1[b + 1]]
        assert tokens.tolist() == replica.ended[rollout].token_ids


def test_a_running_rollout_that_was_dropped_stays_out():
    replica = Replica(6, max_bytes=4 * 60, num_groups=1)
    replica.begin(1)
    (long,) = replica.running
    replica.outbox.follow([long])
    replica.emit(long, 100)
    assert replica.outbox.take().num_tokens == 0
    replica.emit(long, 5)
    replica.outbox.follow([long])
    assert replica.outbox.take().num_tokens == 0
    replica.end(long)
    assert replica.outbox.take().rollouts_B.size == 0
    assert replica.outbox.dropped_rollouts == 1


def test_an_inbox_that_is_behind_drops_the_oldest_rollouts_whole():
    replica = Replica(7)
    corpus = new_corpus()
    inbox = new_inbox(corpus, max_bytes=4 * 300)
    for _ in range(40):
        replica.run_alone()
        inbox.put(replica.outbox.take())
    inbox.feed(0, ALL)
    assert inbox.lost_rollouts > 20
    kept = replica.ended[inbox.lost_rollouts :]
    expected = held_natively(kept)
    assert num_live(corpus) == num_live(expected)
    corpus.check_integrity()


def test_lost_and_repeated_deltas():
    replica = Replica(8, num_groups=1)
    corpus = new_corpus()
    inbox = new_inbox(corpus)
    replica.begin(2)
    deltas = []
    for _ in range(4):
        replica.step()
        deltas.append(replica.outbox.take())
    inbox.put(deltas[0])
    inbox.put(deltas[0])
    inbox.put(deltas[1])
    inbox.feed(0, ALL)
    inbox.put(deltas[1])
    inbox.put(deltas[0])
    inbox.feed(0, ALL)
    heard = num_live(corpus)
    assert heard == 12 + deltas[0].num_tokens + deltas[1].num_tokens
    inbox.put(deltas[3])  # the third was lost: what continues it is left out
    inbox.feed(0, ALL)
    assert inbox.lost_rollouts == len(set(deltas[3].rollouts_B.tolist()))
    assert num_live(corpus) == heard
    listener = new_inbox(new_corpus())  # began to listen late: rollouts under way are left out
    listener.put(deltas[3])
    listener.feed(0, ALL)
    assert listener.learned_tokens == 0


def test_foreign_rollouts_leave_half_of_the_sequences_to_own_ones():
    corpus = new_corpus(max_bytes=256 << 10)
    inbox = new_inbox(corpus)
    replica = Replica(9)
    replica.begin(corpus.max_sequences)
    for _ in range(4):
        replica.step()
    inbox.put(replica.outbox.take())
    inbox.feed(0, ALL)
    assert corpus.counters()["open_sequences"] == inbox.max_sequences == corpus.max_sequences // 2
    assert inbox.lost_rollouts > 0


def test_malformed_deltas_are_refused_by_field():
    replica = Replica(10)
    replica.begin(3)
    replica.step()
    replica.step()
    delta = replica.outbox.take()
    for name in [each.name for each in fields(delta) if each.name not in ("sender", "number")]:
        array = getattr(delta, name)
        for bad in (array.astype(np.float32), array[None], np.append(array, array[:1]), None):
            with pytest.raises(InvalidInputError, match=r"delta\."):
                replace(delta, **{name: bad})
    for name, values in (
        ("offsets_B1", delta.offsets_B1[::-1].copy()),
        ("contexts_B", delta.contexts_B + 99),
        ("starts_B", delta.starts_B - 1),
        ("sender", -1),
    ):
        with pytest.raises(InvalidInputError, match=rf"delta\.{name}"):
            replace(delta, **{name: values})
    corpus = new_corpus()
    with pytest.raises(InvalidInputError, match=r"delta\.tokens_N=.*must be in \[0, 50000\)"):
        new_inbox(corpus).put(replace(delta, tokens_N=delta.tokens_N + VOCAB))
    assert num_live(corpus) == 0


# Through engines


def make_engine(model: Path, spec: str = "ngram", **options) -> RolloutEngine:
    return RolloutEngine.from_pretrained(
        model, spec, spec_options=options, max_running=4, num_threads=1
    )


def ngram(model: Path) -> RolloutEngine:
    return make_engine(model, corpus_bytes=1 << 20, budget="fixed", calibration_seconds=0)


def test_engines_learn_from_each_other_and_their_tokens_stay_the_same(tiny_model_path):
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    params = SamplingParams(temperature=0.7, max_new_tokens=60, n=2, ignore_eos=True)
    first, second, alone = (ngram(tiny_model_path) for _ in range(3))
    for engine in (first, second):
        engine.share_corpus()
    expected = first.generate(prompts, params)
    second.learn_corpus_deltas([first.take_corpus_delta()])
    rollouts = second.generate(prompts, params)
    assert outcome(rollouts) == outcome(expected)
    alone.generate(prompts, params)
    assert second.metrics().accept_length > 1.5 * alone.metrics().accept_length
    own = second.take_corpus_delta()
    second.learn_corpus_deltas([own])  # passed over
    assert own.num_tokens == sum(len(r.token_ids) for r in rollouts)  # none of what it learned
    assert own.ends_B.sum() == len(rollouts)  # so that nothing of them waits for more
    counters = second.worker.counters()
    assert counters["corpus/learned_tokens"] == counters["corpus/shared_tokens"] == own.num_tokens
    assert not any("learned_tokens" in name for name in alone.worker.counters())


def test_sharing_is_off_until_it_is_asked_for(tiny_model_path):
    engine = ngram(tiny_model_path)
    for call in (engine.take_corpus_delta, lambda: engine.learn_corpus_deltas([])):
        with pytest.raises(InvalidInputError, match="share_corpus"):
            call()
    with pytest.raises(InvalidInputError, match="max_bytes"):
        engine.share_corpus(0)
    engine.share_corpus()
    with pytest.raises(InvalidInputError, match="already"):
        engine.share_corpus()
    with pytest.raises(InvalidInputError, match="deltas=3"):
        engine.learn_corpus_deltas([3])
    with pytest.raises(InvalidInputError, match="has no corpus"):
        make_engine(tiny_model_path, "none").share_corpus()
