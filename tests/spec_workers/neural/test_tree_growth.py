"""Trees grown level by level against a plain search over the same made-up draft."""

from __future__ import annotations

import numpy as np
import pytest

from spec_workers.neural.tree_growth import TreeGrowth
from tests.helpers.tree_checks import check_trees

WIDTH = 6


def children(tree: int, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and probabilities below a path, the most probable first: a function of the path."""
    random = np.random.default_rng([tree, 7, *path])
    probs = np.sort(random.dirichlet(np.full(WIDTH + 1, 0.3))[:WIDTH].astype(np.float32))[::-1]
    return random.permutation(50)[:WIDTH], probs


def grow(sizes, depths, *, topk, floor, steps):
    """The finished trees, and how many nodes were run."""
    growth = TreeGrowth(
        np.array(sizes), np.array(depths), topk=topk, max_nodes=topk * (steps - 1), floor=floor
    )
    paths: list[tuple[int, ...]] = [()] * len(sizes)

    def add(level, trees):
        found = [children(tree, path) for tree, path in zip(trees, paths, strict=True)]
        tokens = np.array([each[0] for each in found]).reshape(-1, WIDTH)
        probs = np.array([each[1] for each in found], dtype=np.float32).reshape(-1, WIDTH)
        growth.add(level, tokens, probs)

    add(None, range(len(sizes)))
    masks: dict[int, list[int]] = {}
    paths_run: dict[int, list[tuple[int, ...]]] = {}
    run = 0
    for _ in range(steps - 1):
        level = growth.expand()
        above, paths = paths, []
        for parent, token in zip(
            level.parent_rows_F.tolist(), level.tokens_F.tolist(), strict=True
        ):
            paths.append((*above[parent], token))
        assert [len(path) for path in paths] == level.depths_F.tolist()
        run += len(paths)
        check_masks(level, paths, masks, paths_run)
        add(level, level.trees_F.tolist())
    return growth.finish(source=3), run


def check_masks(level, paths, masks, paths_run):
    """A node's mask names the nodes run before that are on its path, and itself."""
    offsets = np.concatenate([[0], np.cumsum(level.counts_B)])
    for tree, path in zip(level.trees_F.tolist(), paths, strict=True):
        paths_run.setdefault(tree, []).append(path)
    for b, tree in enumerate(level.trees_B.tolist()):
        given = level.masks_N[offsets[b] : offsets[b + 1]].tolist()
        assert given[: -int(level.new_B[b])] == masks.get(tree, [])
        masks[tree] = given
        for mask, path in zip(given, paths_run[tree], strict=True):
            on_path = [p for j, p in enumerate(paths_run[tree]) if mask >> (j + 1) & 1]
            assert on_path == [path[:k] for k in range(1, len(path) + 1)]
            assert mask & 1


def searched(tree, size, depth, *, topk, floor, steps):
    """{path: probability} of the best nodes, each level's ``topk`` best expanded."""
    found: dict[tuple[int, ...], float] = {}
    frontier = [((), 1.0)]
    for level in range(min(steps, depth)):
        frontier = sorted(frontier, key=lambda node: -node[1])[:topk] if level else frontier
        below = []
        for path, before in frontier:
            tokens, probs = children(tree, path)
            for token, prob in list(zip(tokens.tolist(), probs, strict=True))[:topk]:
                if before * float(prob) >= floor:
                    below.append(((*path, token), float(np.float32(before) * prob)))
        found |= dict(below)
        frontier = below
    best = sorted(found.items(), key=lambda node: (-node[1], len(node[0])))[:size]
    return dict(best)


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("floor", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_most_probable_are_kept(topk, floor, steps):
    sizes = [8, 0, 1, 3, 16, 40, 5]
    depths = [5, 5, 5, 2, 5, 4, 1]
    trees, _ = grow(sizes, depths, topk=topk, floor=floor, steps=steps)
    check_trees(trees)
    for g, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
        nodes = slice(int(trees.offsets_B1[g]), int(trees.offsets_B1[g + 1]))
        tokens, parents = trees.tokens_N[nodes].tolist(), trees.parents_N[nodes].tolist()
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], token))
        wanted = searched(g, size, depth, topk=topk, floor=floor, steps=steps)
        assert dict(zip(paths[1:], trees.probs_N[nodes].tolist(), strict=True)) == wanted
        assert np.all(np.diff(trees.probs_N[nodes]) <= 0)
    assert set(trees.sources_N.tolist()) <= {3}


def test_nothing_is_run_that_could_not_be_kept():
    _, run = grow([4] * 20, [9] * 20, topk=7, floor=0.0, steps=9)
    wanted = 0
    for tree in range(20):
        best = searched(tree, 4, 9, topk=7, floor=0.0, steps=9)
        # At least each kept node that has a kept child; at most three of a tree in each level.
        wanted += len({path[:-1] for path in best if len(path) > 1})
    assert wanted <= run <= 20 * 3 * 8
    assert run < 1.5 * wanted + 60


def test_equal_probabilities_keep_parents_first():
    growth = TreeGrowth(np.array([3]), np.array([3]), topk=2, max_nodes=4, floor=0.0)
    certain = np.array([[5, 6]]), np.array([[1.0, 0.0]], dtype=np.float32)
    growth.add(None, *certain)
    for _ in range(2):
        growth.add(growth.expand(), *certain)
    trees = growth.finish(source=0)
    check_trees(trees)
    assert trees.parents_N.tolist() == [0, 1, 2]


def test_probabilities_that_are_none_are_no_nodes():
    growth = TreeGrowth(np.array([3]), np.array([3]), topk=2, max_nodes=4, floor=0.0)
    growth.add(None, np.array([[5, 6]]), np.array([[np.nan, 0.0]], dtype=np.float32))
    assert not len(growth.expand().trees_F)
    assert growth.finish(source=0).num_nodes == 0


def test_no_trees_at_all():
    growth = TreeGrowth(np.zeros(0, int), np.zeros(0, int), topk=2, max_nodes=4, floor=0.0)
    nothing = np.zeros((0, 2), dtype=np.int64), np.zeros((0, 2), dtype=np.float32)
    growth.add(None, *nothing)
    growth.add(growth.expand(), *nothing)
    trees = growth.finish(source=0)
    assert trees.offsets_B1.tolist() == [0]
