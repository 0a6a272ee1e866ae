"""The corpus's promises beside its answers: memory, sharing, sequences and their proposals.

Its answers, how proposals are judged, and what a version changes: test_against_reference.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ngram_native import Corpus
from tests.native.drafts import (
    LARGEST,
    NOBODY,
    SMALL,
    TREE_NODES,
    assert_well_formed,
    extend,
    i32,
    propose,
    query,
)

ROOT = str(Path(__file__).resolve().parents[2])


def drafted(corpus, ids, budget=20):
    """The number of nodes proposed for these sequences."""
    return sum(map(len, propose(corpus, ids, budget)))


@pytest.mark.parametrize(("token", "max_bytes"), [(0, 64 << 20), (LARGEST, SMALL)])
def test_a_million_identical_tokens(token, max_bytes):
    million = np.full(1_000_000, token, np.int32)
    corpus = Corpus(max_bytes=max_bytes)
    corpus.insert(million, group=1)
    corpus.open(1, 1, million)
    corpus.add_external("x", [million])
    (tree,) = propose(corpus, [1])
    assert tree
    assert {node.token for node in tree} == {token}
    assert_well_formed(tree, TREE_NODES, 0.0)
    assert query(corpus, 1, million[:64].tolist()) == tree
    corpus.check_integrity()


def test_oldest_policy_goes_first():
    corpus = Corpus(max_bytes=SMALL)
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


@pytest.mark.parametrize("max_bytes", [SMALL, 8 << 20])
def test_memory_is_bounded_when_full(max_bytes):
    corpus = Corpus(max_bytes=max_bytes)
    rng = np.random.default_rng(0)
    for sequence_id in range(4):
        corpus.open(sequence_id, sequence_id, i32())
    for _ in range(2 * max_bytes // 20 // 4000 + 1):
        extend(corpus, {s: rng.integers(0, 900, 1000) for s in range(4)})
        propose(corpus, range(4))
        assert corpus.num_bytes <= max_bytes
    assert corpus.counters()["dropped_tokens"] > 0
    assert corpus.num_bytes > 0.9 * max_bytes - (64 << 10)
    corpus.check_integrity()


def test_sequence_goes_on_when_its_page_is_the_next_to_go():
    def filled(pages):
        corpus = Corpus(max_bytes=SMALL)
        corpus.open(1, 1, np.arange(32, dtype=np.int32))  # a whole page
        for _ in range(pages):
            corpus.insert(i32([7]))
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


def test_verified_is_of_the_last_proposal_and_ends_with_the_next_tokens():
    corpus = Corpus()
    corpus.open(1, 7, i32([5, 6, 7, 8, 5, 6]))
    corpus.open(2, 8, i32([1]))

    def most():
        with pytest.raises(ValueError, match=r"verified\[1\]=64: must be in \[0, \d+\]") as refused:
            extend(corpus, {2: [], 1: [0]}, [0, 64])
        return int(str(refused.value).split("[0, ")[1].split("]")[0])

    assert most() == 0
    assert drafted(corpus, [1, 2], budget=3) == most() == 3
    assert drafted(corpus, [1, 2], budget=2) == most() == 2
    propose(corpus, [1], budget=0)
    assert most() == 0
    propose(corpus, [1], budget=3)
    extend(corpus, {1: []}, [3])  # no token: it stays to be judged
    assert most() == 3
    extend(corpus, {1: [7]}, [3])
    assert most() == 0
    propose(corpus, [1], budget=3)
    corpus.reset()
    assert most() == 3, "what is under way can be reported"


def test_no_more_sequences_open_than_there_is_room_for():
    corpus = Corpus(max_bytes=SMALL)
    most = corpus.max_sequences
    rng = np.random.default_rng(0)
    for sequence_id in range(most):
        corpus.open(sequence_id, sequence_id % 3, rng.integers(0, 3, 50).astype(np.int32))
    held = corpus.num_tokens
    with pytest.raises(ValueError, match=f"sequence_id={most}: .*{most} open sequences"):
        corpus.open(most, 0, i32([1, 2, 3]))
    assert corpus.num_tokens == held
    propose(corpus, range(most))
    assert corpus.num_bytes <= SMALL
    assert corpus.counters()["scratch_bytes"] > 0
    corpus.close(0)
    corpus.open(most, 0, i32([1, 2, 3]))
    corpus.check_integrity()
