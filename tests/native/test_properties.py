"""Nine properties of any n-gram corpus, whatever it estimates and however it finds.

Nothing here knows the estimate; test_against_reference.py does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngram_native import Corpus
from tests.native.drafts import (
    LARGEST,
    NOBODY,
    SMALL,
    TREE_NODES,
    answers,
    assert_well_formed,
    children,
    extend,
    i32,
    leaves,
    path,
    propose,
    query,
    random_texts,
    worked_with,
)

repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=60)

seeds = st.integers(0, 2**32 - 1)
groups = st.sampled_from([None, 3])


def distinct(seed, size):
    return np.random.default_rng(seed).choice(10**6, size, replace=False).tolist()


# 1. One query in a batch gives what it gives alone, and incremental state what a fresh query gives:
# test_against_reference.py.


# 2. The end of a document is no draft until something follows it elsewhere.


@repeatable
@given(seed=seeds, size=st.integers(2, 80), shared=st.integers(2, 80), group=groups)
def test_state_sees_what_is_inserted_later(seed, size, shared, group):
    said = distinct(seed, size)
    shared = min(shared, size)
    corpus = Corpus()
    corpus.insert(i32(said), group=group)
    corpus.open(1, 3 if group else NOBODY, i32(said[-shared:]))
    assert propose(corpus, [1]) == [[]]
    before, after = 10**6, 10**6 + 1
    corpus.insert(i32([before, *said[-shared:], after]), group=group)
    (tree,) = propose(corpus, [1])
    assert [node.token for node in tree] == [after]


# 3. Every continuation of the context is offered.


@repeatable
@given(seed=seeds, shared=st.integers(2, 50), branches=st.integers(2, 12), group=groups)
def test_all_continuations_are_offered(seed, shared, branches, group):
    context = distinct(seed, shared)
    corpus = Corpus()
    for branch in range(branches):
        before = [10**6 + branch] * (branch % 3)
        corpus.insert(i32([*before, *context, 2 * 10**6 + branch]), group=group)
    offered = children(query(corpus, 3, context))
    assert set(offered) == {2 * 10**6 + branch for branch in range(branches)}


# 4. More often seen outranks less often; a longer context outranks a shorter.


@repeatable
@given(seed=seeds, shared=st.integers(2, 40), often=st.integers(2, 10), rare_at=seeds, group=groups)
def test_more_often_seen_ranks_higher(seed, shared, often, rare_at, group):
    context = distinct(seed, shared)
    corpus = Corpus()
    for turn in range(often + 1):
        rare = turn == rare_at % (often + 1)
        corpus.insert(i32([*context, 10**6 + rare]), group=group)
    offered = children(query(corpus, 3, context))
    assert offered[10**6] > offered[10**6 + 1]


@repeatable
@given(
    seed=seeds,
    lengths=st.lists(st.integers(2, 32), min_size=2, max_size=2, unique=True),
    longer_first=st.booleans(),
    group=groups,
)
def test_longer_context_ranks_higher(seed, lengths, longer_first, group):
    context = distinct(seed, 32)
    corpus = Corpus()
    for length in sorted(lengths, reverse=longer_first):
        corpus.insert(i32([10**6, *context[-length:], 2 * 10**6 + length]), group=group)
    offered = children(query(corpus, 3, context))
    assert offered[2 * 10**6 + max(lengths)] > offered[2 * 10**6 + min(lengths)]


# 5. Nothing crosses a document boundary; budgets are honoured to the node.


@repeatable
@given(
    seed=seeds,
    sizes=st.lists(st.integers(1, 70), min_size=2, max_size=6),
    scope=st.sampled_from(["group", "live", "external", "sequence"]),
)
def test_nothing_crosses_a_document_boundary(seed, sizes, scope):
    said = distinct(seed, sum(sizes))
    ends = np.cumsum(sizes).tolist()
    documents = [said[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    corpus = Corpus()
    if scope == "external":
        corpus.add_external("x", [i32(document) for document in documents])
    for sequence_id, document in enumerate(documents):
        if scope == "sequence":
            corpus.open(sequence_id, 3, i32(document))
        elif scope != "external":
            corpus.insert(i32(document), group=3 if scope == "group" else None)
    for end, document in zip(ends, documents, strict=True):
        assert query(corpus, 3, said[:end]) == []
        for split in range(2, len(document)):
            # A context that goes back over the boundary matches no more than one that does not.
            tree = query(corpus, 3, said[: end - len(document) + split])
            assert tree == query(corpus, 3, document[:split])
            assert path(tree, len(tree) - 1) == document[split : split + TREE_NODES]


@repeatable
@given(seed=seeds, alphabet=st.integers(2, 6), floor=st.sampled_from([0.0, 0.02, 0.2]))
def test_budgets_are_kept_to_the_node(seed, alphabet, floor):
    texts = random_texts(seed, 5, 60, alphabet)
    corpus = Corpus()
    for group, text in enumerate(texts[:-1]):
        corpus.insert(i32(text), group=group)
    corpus.add_external("x", [i32(text) for text in texts[:2]])
    whole = query(corpus, 1, texts[-1])
    for budget in range(TREE_NODES + 1):
        # Best first: a smaller tree is the beginning of a larger one, at any floor.
        expected = [node for node in whole[:budget] if node.probability >= floor]
        tree = query(corpus, 1, texts[-1], budget, floor)
        assert tree == expected
        assert_well_formed(tree, budget, floor)


@repeatable
@given(seed=seeds, budget=st.integers(1, 63), scope=st.sampled_from(["group", "live", "external"]))
def test_a_single_source_fills_the_budget(seed, budget, scope):
    said = distinct(seed, 100)
    corpus = Corpus()
    if scope == "external":
        corpus.add_external("x", [i32(said)])
    else:
        corpus.insert(i32(said), group=3 if scope == "group" else None)
    corpus.insert(i32([*said[5:9], 10**6]))  # of another source, which has but one token
    tree = query(corpus, 3, said[:9], budget)
    assert len(tree) == budget


# 6. Memory full, old material goes first, bytes reported are bytes held: test_contract.py.


# 7. All scopes merge into one tree without duplicate children, ordered by estimated acceptance.


@repeatable
@given(
    seed=seeds,
    scopes=st.lists(
        st.sampled_from([(None, None), (3, None), (4, None), (None, "a"), (None, "b")]),
        min_size=2,
        max_size=8,
    ),
)
def test_scopes_merge_into_one_tree(seed, scopes):
    context = distinct(seed, 8)
    corpus = Corpus()
    documents = {"a": [], "b": []}
    said = []
    for turn, (group, name) in enumerate(scopes):
        text = [*context, 10**6, 10**6 + 1 + turn % 3, 2 * 10**6 + turn]
        said.append(text[len(context) :])
        if name:
            documents[name].append(i32(text))
        else:
            corpus.insert(i32(text), group=group)
    for name, texts in documents.items():
        corpus.add_external(name, texts)
    tree = query(corpus, 3, context)
    assert_well_formed(tree, TREE_NODES, 0.0)
    assert sorted(path(tree, leaf) for leaf in leaves(tree)) == sorted(said)


# 8. Any token id from 0 up, any size: an answer, never a crash.


@repeatable
@given(
    tokens=st.lists(st.integers(0, LARGEST) | st.sampled_from([0, LARGEST]), max_size=100),
    repeats=st.sampled_from([1, 2, 50]),
    candidates=st.sampled_from([1, 2, 1024]),
    group=st.integers(-(2**63), 2**64 - 1),
    sequence_id=st.integers(-(2**63), 2**63 - 1),
)
def test_any_tokens_are_answered(tokens, repeats, candidates, group, sequence_id):
    tokens = tokens * repeats
    corpus = Corpus(max_bytes=SMALL, max_candidates=candidates)
    corpus.insert(i32(tokens), group=group)
    corpus.add_external("x", [i32(tokens), i32(), i32(tokens[:1])])
    corpus.open(sequence_id, group, i32(tokens))
    extend(corpus, {sequence_id: tokens[:10]})
    (tree,) = propose(corpus, [sequence_id])
    assert_well_formed(tree, TREE_NODES, 0.0)
    assert {node.token for node in tree} <= set(tokens)
    if len(tokens) > 2 and repeats > 1:
        assert tree
    corpus.check_integrity()


@pytest.mark.parametrize("token", [0, LARGEST])
@pytest.mark.parametrize("max_bytes", [SMALL, 64 << 20])
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


# 9. Threads, a failed load. Saved and loaded again it proposes the same. A fork: test_threads.py.


@repeatable
@given(seed=seeds, other=seeds, cut=st.floats(0, 1), bit=st.integers(0, 7), flip=st.booleans())
def test_saved_is_what_is_loaded_and_a_failed_load_changes_nothing(
    tmp_path_factory, seed, other, cut, bit, flip
):
    path = tmp_path_factory.mktemp("corpus") / "saved"
    corpus, loaded = worked_with(seed), worked_with(other)
    corpus.save(path)
    good = path.read_bytes()
    at = min(int(cut * len(good)), len(good) - 1)
    damaged = bytearray(good)
    damaged[at] ^= 1 << bit
    path.write_bytes(bytes(damaged) if flip else good[:at])
    before = answers(loaded), loaded.num_tokens, loaded.counters()["weight_version"]
    with pytest.raises(ValueError, match="path="):
        loaded.load(path)
    assert (answers(loaded), loaded.num_tokens, loaded.counters()["weight_version"]) == before
    path.write_bytes(good)
    loaded.load(path)
    assert answers(loaded) == answers(corpus)
    for both in (corpus, loaded):  # and they go on the same
        both.insert(i32(random_texts(seed, 1, 3000, 4)[0]), group=1)
        both.set_weight_version(7)
    assert answers(loaded) == answers(corpus)
    loaded.check_integrity()


@settings(repeatable, max_examples=5)
@given(seed=seeds)
def test_threads_ask_at_once_and_get_what_one_gets(seed):
    corpus = worked_with(seed)
    expected = answers(corpus)

    def ask(_):
        assert all(answers(corpus) == expected for _ in range(4))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
