"""The corpus's promises beside the nine properties: memory, sharing, learning, determinism.

How proposals are judged, and what a version changes, is in test_against_reference.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ngram_native import Corpus, Source
from tests.native.drafts import NOBODY, children, extend, query

ROOT = str(Path(__file__).resolve().parents[2])


def i32(*tokens):
    return np.array(tokens, np.int32)


def i64(*values):
    return np.array(values, np.int64)


def propose(corpus, ids, budget=20, floor=0.0):
    ids = i64(*ids)
    return corpus.propose(ids, np.full(len(ids), budget, np.int32), floor)


def test_sequence_copies_from_itself_but_not_from_where_it_stands():
    corpus = Corpus()
    corpus.open(1, 7, i32(5, 6, 7, 8, 5, 6))
    assert propose(corpus, [1]).tokens_N.tolist()[:2] == [7, 8]
    corpus.open(2, 8, i32(1, 2, 3))
    assert propose(corpus, [2]).tokens_N.tolist() == []


def test_external_corpus_offers_what_a_suffix_automaton_would():
    corpus = Corpus()
    once = np.arange(1, 21, dtype=np.int32)
    corpus.add_external("a", [i32(*once, 70), *[i32(9, *once[-5:], 80)] * 1000])
    below = children(query(corpus, NOBODY, once, 8))
    assert below[70] > below[80]  # the longest match, however often shorter ones came since
    corpus.remove_external("a")
    corpus.add_external("a", [i32(1, 2, 3, 4, 5, 6, 7), i32(99, 3, 4, 5, 6, 8)])
    assert set(children(query(corpus, NOBODY, [2, 3, 4, 5, 6], 8))) == {7, 8}
    corpus.remove_external("a")
    corpus.add_external("a", [i32(1, 2, 3, 50)] * 1000 + [i32(1, 2, 3, 60)] * 100)
    below = children(query(corpus, NOBODY, [1, 2, 3], 8))
    assert below[50] > below[60]


def test_oldest_policy_goes_first():
    corpus = Corpus(max_bytes=256 << 10)
    rng = np.random.default_rng(0)
    markers = {}
    for version in range(40):
        corpus.set_weight_version(version)
        markers[version] = np.arange(10_000 + 100 * version, 10_060 + 100 * version, dtype=np.int32)
        corpus.insert(markers[version])
        corpus.insert(rng.integers(0, 50, 400).astype(np.int32))
    held = [corpus.query(NOBODY, m[:20], 8, 0.0).tokens_N.size > 0 for m in markers.values()]
    assert not held[0]
    assert held[-1]
    assert held == sorted(held)  # once a version is held, all later ones are


@pytest.mark.parametrize("max_bytes", [256 << 10, 1 << 20, 8 << 20])
def test_memory_is_bounded_when_full(max_bytes):
    corpus = Corpus(max_bytes=max_bytes)
    rng = np.random.default_rng(0)
    for sequence_id in range(4):
        corpus.open(sequence_id, sequence_id, i32())
    for _ in range(2 * max_bytes // 20 // 4000 + 1):
        extend(corpus, {s: rng.integers(0, 900, 1000) for s in range(4)})
        propose(corpus, range(4), budget=63)
        assert corpus.num_bytes <= max_bytes
    assert corpus.counters()["dropped_tokens"] > 0
    assert corpus.num_bytes > 0.9 * max_bytes - (64 << 10)
    corpus.check_integrity()


RESIDENT = """
import numpy as np
from ngram_native import Corpus

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

rng = np.random.default_rng(0)
documents = [rng.integers(0, 50_000, 100_000).astype(np.int32) for _ in range(30)]
before = resident()
corpus = Corpus(max_bytes=48 << 20)
empty = resident() - before
for group, document in enumerate(documents):
    corpus.insert(document, group=group)
corpus.add_external("x", documents[:5])
print(empty, resident() - before, corpus.num_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_bytes_reported_are_bytes_held():
    run = subprocess.run(
        [sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True, cwd=ROOT
    )
    empty, held, reported = map(int, run.stdout.split())
    assert empty < 8 << 20
    assert abs(held - reported) < 0.05 * reported


def test_siblings_share_their_prompt():
    corpus = Corpus()
    prompt = np.arange(100, dtype=np.int32)
    for sequence_id in range(8):
        corpus.open(sequence_id, 5, prompt)
    assert corpus.num_tokens == 100
    extend(corpus, {3: [1, 2, 3, 4, 5, 6]})
    assert propose(corpus, [0], budget=6).tokens_N.tolist() == [1, 2, 3, 4, 5, 6]
    corpus.open(8, 6, prompt)  # another group has its own copy
    assert corpus.num_tokens == 206


def test_resubmitted_rollout_adds_only_what_is_new():
    corpus = Corpus()
    prompt = np.arange(50, dtype=np.int32)
    for sequence_id in range(4):
        corpus.open(sequence_id, 5, prompt)
        extend(corpus, {sequence_id: [100, 101, 200 + sequence_id, 300]})
    held = corpus.num_tokens
    for sequence_id in range(4):
        corpus.close(sequence_id)
        partial = i32(*prompt, 100, 101, 200 + sequence_id)
        corpus.open(sequence_id, 5, partial)
        assert corpus.num_tokens == held
        assert propose(corpus, [sequence_id]).tokens_N[0] == 300  # what it said before
    corpus.open(9, 5, i32(*prompt, 100, 101, 202, 7, 8))
    assert corpus.num_tokens == held + 2


def test_calibration_learns_whom_to_believe():
    corpus = Corpus()
    rng = np.random.default_rng(0)
    corpus.open(1, 1, rng.integers(0, 3, 500).astype(np.int32))  # noise foretells nothing
    first = propose(corpus, [1]).probabilities_N.sum()
    for _ in range(300):
        propose(corpus, [1])
        extend(corpus, {1: rng.integers(3, 1000, 1)})
        extend(corpus, {1: rng.integers(0, 3, 6)})
    assert propose(corpus, [1]).probabilities_N.sum() < 0.7 * first
    context = propose(corpus, [1])
    corpus.set_weight_version(1)
    assert (propose(corpus, [1]).probabilities_N != context.probabilities_N).any()


def test_a_substituted_token_does_not_end_the_copy():
    corpus = Corpus()
    said = np.arange(1, 30, dtype=np.int32)
    corpus.insert(said, group=1)
    tree = query(corpus, 1, [*said[:10], 777], 8)
    assert [node.token for node in tree] == said[11:19].tolist()
    assert {Source(node.source) for node in tree} == {Source.GAP}
    assert query(corpus, NOBODY, [*said[:10], 777], 8) == []  # of the group alone


def test_external_corpora_come_and_go():
    corpus = Corpus(max_external_bytes=1 << 20)
    corpus.add_external("b", [i32(1, 2, 3, 4, 5, 6)])
    corpus.add_external("a", [i32(1, 2, 3, 4, 5, 7), i32()])
    corpus.add_external("empty", [])
    assert corpus.external_names() == ["a", "b", "empty"]
    assert set(corpus.query(0, i32(1, 2, 3, 4, 5), 8, 0.0).tokens_N.tolist()) == {6, 7}
    with pytest.raises(ValueError, match="name='a'"):
        corpus.add_external("a", [i32(1)])
    with pytest.raises(ValueError, match="max_external_bytes"):
        corpus.add_external("big", [np.zeros(100_000, np.int32)])
    assert corpus.external_names() == ["a", "b", "empty"]
    corpus.reset()  # forgets rollouts, not these
    corpus.remove_external("b")
    assert corpus.query(0, i32(1, 2, 3, 4, 5), 8, 0.0).tokens_N.tolist() == [7]
    with pytest.raises(ValueError, match="name='b'"):
        corpus.remove_external("b")
    corpus.check_integrity()


def test_groups_share_nothing_even_where_their_hashes_meet():
    corpus = Corpus(max_bytes=512 << 10)  # a small table: some of so many groups share a slot
    prompt = np.arange(20, dtype=np.int32)
    for group in range(200):
        corpus.open(group, group, prompt)
        corpus.close(group)
        assert corpus.num_tokens == 20 * (group + 1)


def test_sequence_goes_on_when_its_page_is_the_next_to_go():
    def filled(pages):
        corpus = Corpus(max_bytes=256 << 10)
        corpus.open(1, 1, np.arange(32, dtype=np.int32))  # a whole page
        for _ in range(pages):
            corpus.insert(i32(7))
        return corpus

    room = 1
    while filled(room).counters()["dropped_tokens"] == 0:
        room *= 2
    room = int(filled(room).counters()["live_tokens"])  # nearly all pages hold one token
    for pages in range(room - 4, room + 5):
        corpus = filled(pages)
        extend(corpus, {1: [5, 6]})
        corpus.check_integrity()
        extend(corpus, {1: range(40)})
        corpus.check_integrity()


def test_verified_is_of_the_last_proposal_and_ends_with_the_next_tokens(tmp_path):
    corpus = Corpus()
    corpus.open(1, 7, i32(5, 6, 7, 8, 5, 6))
    corpus.open(2, 8, i32(1))

    def most():
        with pytest.raises(ValueError, match=r"verified\[1\]=64: must be in \[0, \d+\]") as refused:
            extend(corpus, {2: [], 1: [0]}, [0, 64])
        return int(str(refused.value).split("[0, ")[1].split("]")[0])

    assert most() == 0
    assert len(propose(corpus, [1, 2], budget=3)) == most() == 3
    assert len(propose(corpus, [1, 2], budget=2)) == most() == 2
    propose(corpus, [1], budget=0)
    assert most() == 0
    propose(corpus, [1], budget=3)
    extend(corpus, {1: []}, [3])  # no token: it stays to be judged
    assert most() == 3
    extend(corpus, {1: [7]}, [3])
    assert most() == 0
    # What is under way can be reported, though the corpus has forgotten why it was proposed.
    propose(corpus, [1], budget=3)
    corpus.save(tmp_path / "saved")
    corpus.reset()
    assert most() == 3
    corpus.load(tmp_path / "saved")
    extend(corpus, {1: [8]}, [3])
    assert most() == 0


def test_no_more_sequences_open_than_there_is_room_for():
    corpus = Corpus(max_bytes=256 << 10)
    most = corpus.max_sequences
    rng = np.random.default_rng(0)
    for sequence_id in range(most):
        corpus.open(sequence_id, sequence_id % 3, rng.integers(0, 3, 50).astype(np.int32))
    held = corpus.num_tokens
    with pytest.raises(ValueError, match=f"sequence_id={most}: .*{most} open sequences"):
        corpus.open(most, 0, i32(1, 2, 3))
    assert corpus.num_tokens == held
    propose(corpus, range(most), budget=63)
    assert corpus.num_bytes <= 256 << 10
    assert corpus.counters()["scratch_bytes"] > 0
    corpus.close(0)
    corpus.open(most, 0, i32(1, 2, 3))
    corpus.check_integrity()


def test_tokens_are_of_the_vocabulary(tmp_path):
    corpus = Corpus(vocab_size=10)
    corpus.open(1, 1, i32(9))
    for call in (
        lambda: corpus.insert(i32(3, 10)),
        lambda: corpus.open(2, 1, i32(3, 10)),
        lambda: corpus.query(1, i32(3, 10), 8, 0.0),
        lambda: extend(corpus, {1: [3, 10]}),
    ):
        with pytest.raises(ValueError, match=r"tokens\[1\]=10: must be below vocab_size=10"):
            call()
    larger = Corpus(vocab_size=11)
    larger.save(tmp_path / "empty")
    corpus.load(tmp_path / "empty")
    for add in (lambda: larger.insert(i32(10)), lambda: larger.add_external("x", [i32(10)])):
        larger.reset()
        add()
        larger.save(tmp_path / "larger")
        with pytest.raises(ValueError, match="damaged"):
            corpus.load(tmp_path / "larger")


PRINT_TREES = """
from tests.native.drafts import answers, i32, random_texts, worked_with
corpus = worked_with(4)
corpus.add_external("a", [i32(text) for text in random_texts(5, 3, 60, 4)])
print(answers(corpus))
"""


def test_another_process_draws_the_same_trees():
    def printed(hash_seed):
        environment = {
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([ROOT, *sys.path]),
        }
        return subprocess.run(
            [sys.executable, "-c", PRINT_TREES],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    first = printed("1")
    assert len(first) > 1000
    assert printed("2") == first
