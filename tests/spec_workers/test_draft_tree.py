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
    for trial in range(100):
        trees = random_trees(rng)
        sizes = np.diff(trees.offsets_B1)
        counts_B = rng.integers(0, sizes + 1) if trial else np.zeros_like(sizes)
        kept, kept_N = first_nodes(trees, counts_B)
        check_trees(kept)
        if not trial:
            for name in ("offsets_B1", *FIELDS):
                expected = getattr(only_roots(sizes.size), name)
                np.testing.assert_array_equal(getattr(kept, name), expected)
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
