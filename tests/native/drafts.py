"""Calls and their answers in plain Python, and corpora that were worked with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ngram_native import Corpus, Proposal

NOBODY = 999  # a group without documents
SMALL = 256 << 10  # bytes
LARGEST = 2**31 - 1  # token
TREE_NODES = 63


class Drafted(NamedTuple):
    """A node of a tree; node j of a list is tree node j + 1, the root being tree node 0."""

    token: int
    parent: int
    depth: int
    mask: int
    probability: float
    source: int


def i32(tokens: Iterable[int] = ()) -> np.ndarray:
    return np.array(list(tokens), np.int32)


def i64(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int64)


def trees(proposal: Proposal) -> list[list[Drafted]]:
    columns = (
        proposal.tokens_N,
        proposal.parents_N,
        proposal.depths_N,
        proposal.masks_N,
        proposal.probabilities_N,
        proposal.sources_N,
    )
    nodes = [Drafted(*node) for node in zip(*(c.tolist() for c in columns), strict=True)]
    offsets = proposal.offsets_B1.tolist()
    assert offsets[0] == 0
    assert offsets[-1] == len(nodes)
    return [nodes[a:b] for a, b in pairwise(offsets)]


def propose(
    corpus: Corpus, sequence_ids: Iterable[int], budget: int = TREE_NODES, floor: float = 0.0
) -> list[list[Drafted]]:
    ids = i64(sequence_ids)
    return trees(corpus.propose(ids, np.full(len(ids), budget, np.int32), floor))


def query(
    corpus: Corpus,
    group: int,
    text: Sequence[int],
    budget: int = TREE_NODES,
    floor: float = 0.0,
) -> list[Drafted]:
    (tree,) = trees(corpus.query(group, i32(text), budget, floor))
    return tree


def extend(
    corpus: Corpus,
    tokens_by_id: Mapping[int, Sequence[int]],
    verified: Iterable[int] | None = None,
) -> None:
    tokens = [token for tokens in tokens_by_id.values() for token in tokens]
    offsets = np.cumsum([0, *map(len, tokens_by_id.values())], dtype=np.int64)
    counts = None if verified is None else i32(verified)
    corpus.extend(i64(tokens_by_id), i32(tokens), offsets, counts)


def path(tree: list[Drafted], j: int) -> list[int]:
    """Tokens from the root down to the tree's j-th node, counted from 0."""
    above = path(tree, tree[j].parent - 1) if tree[j].parent else []
    return [*above, tree[j].token]


def leaves(tree: list[Drafted]) -> list[int]:
    parents = {node.parent for node in tree}
    return [j for j in range(len(tree)) if j + 1 not in parents]


def assert_well_formed(tree: list[Drafted], budget: int, floor: float) -> None:
    assert len(tree) <= budget
    edges = [(node.parent, node.token) for node in tree]
    assert len(set(edges)) == len(edges), "siblings propose the same token"
    probabilities = [node.probability for node in tree]
    assert probabilities == sorted(probabilities, reverse=True), "not best first"
    for j, node in enumerate(tree, start=1):
        assert 0 <= node.parent < j
        assert node.token >= 0
        assert max(floor, 0.0) <= node.probability <= 1.0 + 1e-7
        above = tree[node.parent - 1] if node.parent else Drafted(-1, -1, 0, 1, 1.0, 0)
        assert node.depth == above.depth + 1
        assert node.mask == above.mask | 1 << j
        assert node.probability <= above.probability


def random_texts(seed: int, count: int, size: int, alphabet: int) -> list[list[int]]:
    """Texts of random sizes, of few tokens near the largest."""
    rng = np.random.default_rng(seed)
    return [
        (LARGEST - rng.integers(0, alphabet, rng.integers(0, size + 1))).tolist()
        for _ in range(count)
    ]


def worked_with(seed: int) -> Corpus:
    """A small corpus that proposed and learned, with an external corpus."""
    corpus = Corpus(max_bytes=SMALL)
    rng = np.random.default_rng(seed)
    for sequence_id, text in enumerate(random_texts(seed, 3, 60, 4)):
        corpus.open(sequence_id, sequence_id % 2, i32(text))
    for version in range(6):
        corpus.set_weight_version(version)
        corpus.insert(i32(rng.integers(0, 4, rng.integers(2000))), group=version % 3)
        propose(corpus, range(3))
        extend(corpus, dict(enumerate(random_texts(seed + version, 3, 5, 4))))
    corpus.add_external("x", [i32(text) for text in random_texts(seed, 3, 60, 4)])
    return corpus


def answers(corpus: Corpus) -> list[list[Drafted]]:
    return [
        query(corpus, seed % 4, text) for seed in range(4) for text in random_texts(seed, 4, 40, 4)
    ]
