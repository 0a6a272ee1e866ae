"""What must hold of any corpus, one test a promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ngram_native import Corpus

ROOT = str(Path(__file__).resolve().parents[2])
NOBODY = 999  # a group without documents


def i32(*tokens):
    return np.array(tokens, np.int32)


def i64(*values):
    return np.array(values, np.int64)


def extend(corpus, tokens_by_id):
    ids = i64(*tokens_by_id)
    offsets = np.cumsum([0, *(len(t) for t in tokens_by_id.values())], dtype=np.int64)
    corpus.extend(
        ids, np.concatenate([np.array(t, np.int32) for t in tokens_by_id.values()]), offsets
    )


def children_of_root(proposal):
    """Token -> probability of the nodes below the root of a proposal of one entry."""
    below = proposal.parents_N == 0
    return dict(
        zip(
            proposal.tokens_N[below].tolist(), proposal.probabilities_N[below].tolist(), strict=True
        )
    )


def entry(proposal, b):
    nodes = slice(proposal.offsets_B1[b], proposal.offsets_B1[b + 1])
    return [array[nodes].tolist() for array in proposal[1:]]


def grown(max_bytes=1 << 20, seed=0, rounds=60, sequences=5):
    """A corpus that was worked with, its open sequences' texts, and its generator."""
    rng = np.random.default_rng(seed)
    corpus = Corpus(max_bytes=max_bytes)
    texts = {}
    for sequence_id in range(sequences):
        prompt = np.full(40, sequence_id % 2) + rng.integers(0, 4, 40) * (sequence_id % 2 == 0)
        texts[sequence_id] = prompt.astype(np.int32)
        corpus.open(sequence_id, sequence_id % 2, texts[sequence_id])
    for step in range(rounds):
        propose(corpus, texts)
        new = {s: rng.integers(0, 4, rng.integers(0, 9)).astype(np.int32) for s in texts}
        extend(corpus, new)
        texts = {s: np.concatenate([texts[s], new[s]]) for s in texts}
        if step % 10 == 0:
            corpus.set_weight_version(step)
    return corpus, texts, rng


def propose(corpus, ids, budget=20, floor=0.0):
    ids = i64(*ids)
    return corpus.propose(ids, np.full(len(ids), budget, np.int32), floor)


def assert_state_is_a_fresh_query(corpus, texts):
    together = propose(corpus, texts)
    for b, (sequence_id, text) in enumerate(texts.items()):
        assert entry(corpus.query(sequence_id % 2, text, 20, 0.0), 0) == entry(together, b)


@pytest.mark.parametrize("seed", range(3))
def test_batch_is_alone_and_state_is_a_fresh_query(seed):
    corpus, texts, _ = grown(seed=seed)
    together = propose(corpus, texts)
    for b, sequence_id in enumerate(texts):
        assert entry(propose(corpus, [sequence_id]), 0) == entry(together, b)
    assert together.offsets_B1[-1] > 0
    assert_state_is_a_fresh_query(corpus, texts)
    before = corpus.num_tokens
    for sequence_id, text in texts.items():  # opened anew, nothing is inserted again
        corpus.open(100 + sequence_id, sequence_id % 2, text)
    assert corpus.num_tokens == before
    again = propose(corpus, [100 + s for s in texts])
    assert [entry(again, b) for b in range(len(texts))] == [
        entry(together, b) for b in range(len(texts))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_state_is_a_fresh_query_after_eviction_and_reset(seed):
    corpus, texts, rng = grown(max_bytes=256 << 10, seed=seed)
    for _ in range(20):
        corpus.insert(rng.integers(0, 4, 300).astype(np.int32), group=int(rng.integers(2)))
        new = {s: rng.integers(0, 4, 7).astype(np.int32) for s in texts}
        extend(corpus, new)
        texts = {s: np.concatenate([texts[s], new[s]]) for s in texts}
        assert_state_is_a_fresh_query(corpus, texts)
    assert corpus.counters()["dropped_tokens"] > 0
    corpus.reset()
    assert corpus.num_tokens == 0
    assert propose(corpus, texts).offsets_B1[-1] == 0
    for _ in range(20):
        new = {s: rng.integers(0, 4, 5).astype(np.int32) for s in texts}
        extend(corpus, new)
        texts = {s: np.concatenate([texts[s], new[s]]) for s in texts}
        assert_state_is_a_fresh_query(corpus, texts)
    assert propose(corpus, texts).offsets_B1[-1] > 0
    corpus.check_integrity()


def test_end_of_a_document_is_no_draft_until_something_follows():
    corpus = Corpus()
    corpus.insert(i32(1, 2, 3))
    corpus.open(1, NOBODY, i32(2, 3))
    assert propose(corpus, [1]).tokens_N.tolist() == []
    corpus.insert(i32(9, 2, 3, 4))
    assert propose(corpus, [1]).tokens_N.tolist() == [4]


def test_sequence_copies_from_itself_but_not_from_where_it_stands():
    corpus = Corpus()
    corpus.open(1, 7, i32(5, 6, 7, 8, 5, 6))
    assert propose(corpus, [1]).tokens_N.tolist()[:2] == [7, 8]
    corpus.open(2, 8, i32(1, 2, 3))
    assert propose(corpus, [2]).tokens_N.tolist() == []


def test_two_continuations_are_both_offered():
    corpus = Corpus()
    corpus.insert(i32(1, 2, 3, 4, 5, 6, 7))
    corpus.insert(i32(99, 3, 4, 5, 6, 8))
    assert set(children_of_root(corpus.query(NOBODY, i32(2, 3, 4, 5, 6), 8, 0.0))) == {7, 8}


@pytest.mark.parametrize("group", [None, 3])
def test_more_often_seen_and_longer_contexts_rank_higher(group):
    corpus = Corpus()
    for _ in range(10):
        corpus.insert(i32(1, 2, 3, 4, 5, 50), group=group)
    corpus.insert(i32(1, 2, 3, 4, 5, 60), group=group)
    children = children_of_root(corpus.query(3, i32(1, 2, 3, 4, 5), 8, 0.0))
    assert children[50] > children[60]
    corpus = Corpus()
    corpus.insert(i32(1, 2, 3, 4, 5, 6, 7, 70), group=group)
    corpus.insert(i32(9, 9, 3, 4, 5, 6, 7, 80), group=group)
    children = children_of_root(corpus.query(3, i32(1, 2, 3, 4, 5, 6, 7), 8, 0.0))
    assert children[70] > children[80]


def test_nothing_crosses_a_document_boundary():
    corpus = Corpus()
    corpus.insert(i32(1, 2, 3), group=1)
    corpus.insert(i32(4, 5, 6), group=1)
    corpus.add_external("x", [i32(1, 2, 3), i32(4, 5, 6)])
    corpus.open(1, 1, i32(1, 2, 3))  # held: the next sequence must not read into it either
    corpus.open(2, 1, i32(0, 1, 2))
    for group in (1, NOBODY):
        assert corpus.query(group, i32(2, 3), 63, 0.0).tokens_N.tolist() == []
        assert corpus.query(group, i32(1, 2), 63, 0.0).tokens_N.tolist() in ([3], [])
        # A match ends where the document begins: 3 before 4 tells nothing.
        assert corpus.query(group, i32(3, 4, 5), 63, 0.0).tokens_N.tolist() == [6]


def test_budgets_are_kept_to_the_node_and_filled_from_any_source():
    corpus, texts, _ = grown(sequences=3)
    rng = np.random.default_rng(1)
    for _ in range(50):
        budgets = rng.integers(0, 64, 3).astype(np.int32)
        proposal = corpus.propose(i64(*texts), budgets, 0.0)
        sizes = np.diff(proposal.offsets_B1)
        assert (sizes <= budgets).all()
        whole = corpus.propose(i64(*texts), np.full(3, 63, np.int32), 0.0)
        assert (sizes == np.minimum(budgets, np.diff(whole.offsets_B1))).all()
        # best first: a smaller budget gives the first nodes of a larger one
        for b in range(3):
            assert entry(proposal, b) == [nodes[: sizes[b]] for nodes in entry(whole, b)]
    alone = Corpus()
    alone.add_external("only", [np.arange(100, dtype=np.int32)])
    assert alone.query(NOBODY, np.arange(9, dtype=np.int32), 40, 0.0).tokens_N.size == 40


def test_floor_cuts_the_least_likely_nodes_only():
    corpus, texts, _ = grown()
    everything, likely = propose(corpus, texts), propose(corpus, texts, floor=0.05)
    assert (likely.probabilities_N >= 0.05).all()
    assert len(likely.tokens_N) == (everything.probabilities_N >= 0.05).sum()


def test_scopes_merge_into_one_tree_without_duplicate_children():
    corpus = Corpus()
    corpus.insert(i32(1, 2, 3, 4, 5, 10, 11), group=1)
    corpus.insert(i32(1, 2, 3, 4, 5, 10, 12), group=2)
    corpus.add_external("a", [i32(1, 2, 3, 4, 5, 10, 13), i32(1, 2, 3, 4, 5, 20)])
    proposal = corpus.query(1, i32(1, 2, 3, 4, 5), 63, 0.0)
    edges = list(zip(proposal.parents_N.tolist(), proposal.tokens_N.tolist(), strict=True))
    assert len(set(edges)) == len(edges)
    assert {token for _, token in edges} == {10, 11, 12, 13, 20}
    below_ten = {t for parent, t in edges if parent and edges[parent - 1][1] == 10}
    assert below_ten == {11, 12, 13}
    assert (np.diff(proposal.probabilities_N) <= 0).all()


def test_trees_are_well_formed():
    corpus, texts, _ = grown()
    proposal = propose(corpus, texts, budget=63)
    for b in range(len(texts)):
        tokens, parents, depths, masks, _ = entry(proposal, b)
        seen = {}
        for j, parent in enumerate(parents):
            node = j + 1
            assert 0 <= parent < node
            assert depths[j] == (depths[parent - 1] if parent else 0) + 1
            assert masks[j] == (masks[parent - 1] if parent else 1) | 1 << node
            assert seen.setdefault((parent, tokens[j]), node) == node


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


@pytest.mark.parametrize(
    "tokens",
    [[], [0], [2**31 - 1], [2**31 - 1, 2**31 - 2] * 20, [7] * 1_000_000],
    ids=["empty", "one", "largest", "near the largest", "a million alike"],
)
def test_any_tokens_are_answered(tokens):
    tokens = np.array(tokens, np.int32)
    corpus = Corpus(max_bytes=1 << 20)
    corpus.insert(tokens, group=-1)
    corpus.open(-(2**63), 2**64 - 1, tokens)
    extend(corpus, {-(2**63): tokens[:10]})
    proposal = propose(corpus, [-(2**63)], budget=63)
    assert set(proposal.tokens_N.tolist()) <= set(tokens[:10].tolist())
    corpus.check_integrity()


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
    learned = corpus.query(1, i32(0, 1, 2, 0), 1, 0.0).probabilities_N[0]
    corpus.set_weight_version(1)
    assert corpus.query(1, i32(0, 1, 2, 0), 1, 0.0).probabilities_N[0] != learned


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


PRINT_TREES = """
from tests.native.test_contract import grown, propose
corpus, texts, _ = grown(seed=4)
corpus.add_external("z", list(texts.values()))
corpus.add_external("y", list(texts.values())[::-1])
proposal = propose(corpus, texts, budget=63)
print([array.tobytes().hex() for array in proposal])
"""


def test_another_process_draws_the_same_trees():
    def trees(hash_seed):
        environment = {
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([ROOT, *sys.path]),
        }
        return subprocess.run(
            [sys.executable, "-c", PRINT_TREES],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    first = trees("1")
    assert len(first) > 1000
    assert trees("2") == first
