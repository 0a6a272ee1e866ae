"""Smaller trees of larger ones."""

from __future__ import annotations

import numpy as np

from spec_workers.draft_tree import first_nodes, only_roots
from tests.helpers.requests import make_trees
from tests.helpers.tree_checks import check_trees

FIELDS = ("tokens_N", "parents_N", "depths_N", "masks_N", "probs_N", "sources_N")


def random_trees(rng):
    trees = make_trees(
        [
            (rng.integers(0, 97, size).tolist(), [int(rng.integers(0, j + 1)) for j in range(size)])
            for size in rng.choice([0, 0, 1, 2, 7, 63], rng.integers(1, 6)).tolist()
        ]
    )
    trees.probs_N[:] = rng.random(trees.num_nodes)
    trees.sources_N[:] = rng.integers(0, 4, trees.num_nodes)
    return trees


def test_first_nodes_are_those_of_a_loop():
    rng = np.random.default_rng(3)
    for _ in range(100):
        trees = random_trees(rng)
        sizes = np.diff(trees.offsets_B1)
        counts_B = rng.integers(0, sizes + 1)
        kept, kept_N = first_nodes(trees, counts_B)
        check_trees(kept)
        nodes = [
            int(first) + k
            for first, count in zip(trees.offsets_B1, counts_B, strict=False)
            for k in range(count)
        ]
        assert np.diff(kept.offsets_B1).tolist() == counts_B.tolist()
        assert np.flatnonzero(kept_N).tolist() == nodes
        for name in FIELDS:
            whole, part = getattr(trees, name), getattr(kept, name)
            assert part.dtype == whole.dtype
            assert part.tolist() == whole[nodes].tolist()


def test_none_and_all_of_the_nodes():
    trees = random_trees(np.random.default_rng(4))
    sizes = np.diff(trees.offsets_B1)
    none, _ = first_nodes(trees, np.zeros_like(sizes))
    everything, kept_N = first_nodes(trees, sizes)
    roots = only_roots(sizes.size)
    assert kept_N.all()
    for name in ("offsets_B1", *FIELDS):
        np.testing.assert_array_equal(getattr(none, name), getattr(roots, name))
        np.testing.assert_array_equal(getattr(everything, name), getattr(trees, name))
        assert getattr(none, name).dtype == getattr(roots, name).dtype
