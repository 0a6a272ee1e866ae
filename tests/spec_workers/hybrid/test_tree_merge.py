"""One tree from two, against a plain merge of token paths, node by node."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.types import DraftTrees
from spec_workers.hybrid.tree_merge import merge_trees
from tests.helpers.requests import make_trees
from tests.helpers.tree_checks import Path, check_trees, paths_of

DOUBT = 0.02
SOURCES = (2, 1)

Tree = dict[Path, tuple[float, int]]  # of each node its probability given its parent, its source


@st.composite
def trees(draw, num_sources: int) -> Tree:
    """At most 24 nodes over few tokens, so that two trees meet often."""
    tree: Tree = {}
    for _ in range(draw(st.integers(0, 24))):
        parent = draw(st.sampled_from([(), *tree]))
        path = (*parent, draw(st.integers(0, 3)))
        taken = sum(p for other, (p, _) in tree.items() if other[:-1] == parent)
        if path in tree or taken > 0.99 or len(path) > 9:
            continue
        p = draw(st.floats(0.01, 1.0)) * (1.0 - taken)
        tree[path] = (p, draw(st.integers(0, num_sources - 1)))
    return tree


def flat(entries: list[Tree]) -> DraftTrees:
    """The trees as a worker proposes them: the most probable nodes first."""
    shapes, probs, sources = [], [], []
    for tree in entries:
        joint = {path: math.prod(tree[path[: k + 1]][0] for k in range(len(path))) for path in tree}
        order = sorted(tree, key=lambda path: (-joint[path], len(path)))
        number = {(): 0} | {path: j for j, path in enumerate(order, start=1)}
        shapes.append(([path[-1] for path in order], [number[path[:-1]] for path in order]))
        probs += [joint[path] for path in order]
        sources += [tree[path][1] for path in order]
    found = make_trees(shapes)
    found.probs_N = np.array(probs, dtype=np.float32)
    found.sources_N = np.array(sources, dtype=np.uint8)
    return found


def merged_plainly(ngram: Tree, neural: Tree) -> dict[Path, tuple[float, int]]:
    """The probability from the root and the source of each path of either tree."""
    union = sorted({*ngram, *neural}, key=len)
    joint: dict[Path, float] = {(): 1.0}
    found = {}

    def say(tree: Tree, parent: Path) -> float:
        listed = [p for path, (p, _) in tree.items() if path[:-1] == parent]
        return min(1.0, sum(listed)) / (1.0 - max(listed) + DOUBT) if listed else 0.0

    for path in union:
        parent = path[:-1]
        says = [say(tree, parent) for tree in (ngram, neural)]
        given_parent = [tree[path][0] if path in tree else 0.0 for tree in (ngram, neural)]
        p = sum(s * q for s, q in zip(says, given_parent, strict=True)) / sum(says)
        joint[path] = joint[parent] * p
        source = ngram[path][1] if path in ngram else SOURCES[0] + neural[path][1]
        if path in ngram and path in neural:
            source = sum(SOURCES) + neural[path][1]
        found[path] = (joint[path], source)
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(trees(SOURCES[0]), trees(SOURCES[1])), min_size=1, max_size=4),
    st.data(),
)
def test_against_a_plain_merge(pairs, data):
    limits = [data.draw(st.integers(0, 48)) for _ in pairs]
    floor = data.draw(st.sampled_from([0.0, 0.021337, 0.207171]))
    ngram, neural = flat([pair[0] for pair in pairs]), flat([pair[1] for pair in pairs])
    merged = merge_trees(ngram, neural, limits_B=np.array(limits), floor=floor, num_sources=SOURCES)
    found = merged.trees
    check_trees(found)
    for b, (first, second) in enumerate(pairs):
        own = slice(int(found.offsets_B1[b]), int(found.offsets_B1[b + 1]))
        expected = merged_plainly(first, second)
        own_paths, probs = paths_of(found, b), found.probs_N[own]
        assert len(set(own_paths)) == len(own_paths) <= limits[b]
        assert (np.diff(probs) <= 0).all()
        assert (probs >= np.float32(floor)).all()
        # The most probable are kept: by the plain merge's numbers, up to rounding.
        may_be_kept = sorted((p for p, _ in expected.values() if p >= floor), reverse=True)
        np.testing.assert_allclose(probs, may_be_kept[: limits[b]], rtol=1e-5)
        for path, p, source in zip(own_paths, probs, found.sources_N[own], strict=True):
            assert p == pytest.approx(expected[path][0], rel=1e-5)
            assert source == expected[path][1]
        for parent in [(), *own_paths]:
            whole = 1.0 if not parent else probs[own_paths.index(parent)]
            children = [p for path, p in zip(own_paths, probs, strict=True) if path[:-1] == parent]
            assert sum(children) <= whole * (1 + 1e-5)
        places = merged.index_G[ngram.offsets_B1[b] : ngram.offsets_B1[b + 1]]
        kept = [own_paths.index(path) if path in own_paths else -1 for path in paths_of(ngram, b)]
        assert kept == places.tolist()


def merge_one(ngram: Tree, neural: Tree, limit: int = 63) -> dict[Path, float]:
    found = merge_trees(
        flat([ngram]), flat([neural]), limits_B=np.array([limit]), floor=0.0, num_sources=SOURCES
    ).trees
    return dict(zip(paths_of(found, 0), found.probs_N.tolist(), strict=True))


def test_the_surer_tree_decides():
    found = merge_one({(1,): (0.97, 0)}, {(2,): (0.5, 0), (1,): (0.2, 0)})
    assert found[1,] > 0.9
    assert found[2,] < 0.05
    assert merge_one({(1,): (0.2, 0)}, {(2,): (0.9, 0)})[2,] > 0.85
