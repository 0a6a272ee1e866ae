"""Trees grown in fixed shapes against a plain search over the same made-up draft, on the host's
arrays and on a device's, whatever is in the padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from spec_workers.neural.arrays import Arrays, DeviceArrays
from spec_workers.neural.level_pace import LevelPace
from spec_workers.neural.proposal import Proposal
from spec_workers.neural.tree_growth import TreeGrowth
from tests.helpers.requests import decode_batch
from tests.helpers.tree_checks import Path, check_trees, paths_of

Children = Callable[[int, Path], tuple[np.ndarray, np.ndarray]]

ARRAYS = {"host": Arrays(), "device": DeviceArrays(torch.device("cpu"))}


@pytest.fixture(params=ARRAYS)
def arrays(request) -> Arrays:
    return ARRAYS[request.param]


def some_children(width: int, *, ties: bool = False) -> Children:
    """Tokens and probabilities below a path, the most probable first: a function of the path."""

    def children(tree: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng([tree, 7, *path])
        probs = random.dirichlet(np.full(width + 1, 0.3))[:width].astype(np.float32)
        if ties:
            probs = random.choice(np.array([0.0, 0.25, 0.5, 1.0], dtype=np.float32), width)
        return random.permutation(50)[:width], np.sort(probs)[::-1].copy()

    return children


def grow(arrays, children, sizes, depths, *, width, floor, steps, padding=0) -> Proposal:
    """Padding trees, and rows that are no nodes, get probabilities of NaN or one in turn."""
    count = len(sizes) + padding

    def own(array: np.ndarray):
        return array if arrays.on_host else torch.from_numpy(array)

    floor_1 = np.array([max(floor, float(np.finfo(np.float32).tiny))], dtype=np.float32)
    sizes_G = np.array([*sizes, *[0] * padding], dtype=np.int64)
    depths_G = np.array([*depths, *[0] * padding], dtype=np.int64)
    growth = TreeGrowth(arrays, own(sizes_G), own(depths_G), own(floor_1), width)
    paths: list[list[Path | None]] = [[()] if g < len(sizes) else [None] for g in range(count)]
    nodes_run: dict[tuple[int, int], Path] = {}
    for level in range(steps):
        shape = (count, len(paths[0]) if count else 1, width)
        tokens = np.full(shape, -9)
        probs = np.full(shape, np.nan if level % 2 else 1.0, dtype=np.float32)
        for g, own_paths in enumerate(paths):
            for f, path in enumerate(own_paths):
                if path is not None:
                    tokens[g, f], probs[g, f] = children(g, path)
        growth.add(own(tokens), own(probs))
        if level + 1 == steps:
            break
        paths = check_level(growth.expand(), level, width, paths, nodes_run)
    none = np.zeros((count, 0, 0), dtype=np.float32)
    found = {
        "tokens_GC": growth.tokens_GC, "probs_GC": growth.probs_GC,
        "candidates_GN": growth.candidates_GN,
    }  # fmt: skip
    return Proposal(
        batch=decode_batch([]), entries_G=[], topk=width, index_GRK=none, probs_GRK=none,
        ends_GRK=none, uniforms_GL=none, is_greedy_G=None,
        **arrays.read({name: each[: len(sizes)] for name, each in found.items()}),
    )  # fmt: skip


def check_level(nodes, level, width, before, nodes_run) -> list[list[Path | None]]:
    """A node's mask names the nodes run before that are on its path, and itself. Gives the paths
    of the level's rows."""
    first, paths = level * width, []
    for g in range(len(before)):
        paths.append([])
        for n in range(first, first + width):
            mask = int(nodes.masks_GN[g, n]) % 2**64
            if not nodes.is_node_GN[g, n]:
                assert mask == 1 | 2 << n
                assert nodes.tokens_GN[g, n] == 0
                paths[g].append(None)
                continue
            parent = int(nodes.parents_GN[g, n])
            above = () if parent < 0 else before[g][parent - first + width]
            assert above is not None
            path = nodes_run[g, n] = (*above, int(nodes.tokens_GN[g, n]))
            paths[g].append(path)
            on_path = [nodes_run[g, j] for j in range(n + 1) if mask >> (j + 1) & 1]
            assert on_path == [path[:k] for k in range(1, level + 2)]
            assert mask & 1
    return paths


def searched(children, tree, size, depth, *, width, floor, steps) -> dict[Path, float]:
    """The best nodes, each level's ``width`` best expanded; the older of equals come first."""
    found: list[tuple[Path, float]] = []
    frontier: list[tuple[Path, float]] = [((), 1.0)]
    for level in range(min(steps, depth) if size else 0):
        best = sorted(range(len(frontier)), key=lambda f: (-frontier[f][1], f))
        expanded = [frontier[f] for f in sorted(best[:width] if level else best)]
        frontier = []
        for path, before in expanded:
            tokens, probs = children(tree, path)
            for token, prob in zip(tokens.tolist(), probs, strict=True):
                value = float(np.float32(before) * prob)
                if value >= max(floor, float(np.finfo(np.float32).tiny)):
                    frontier.append(((*path, token), value))
        found += frontier
    order = sorted(range(len(found)), key=lambda c: (-found[c][1], c))
    return dict(found[c] for c in order[:size])


def check_searched(trees, children, sizes, depths, **rules) -> None:
    check_trees(trees)
    assert set(trees.sources_N.tolist()) <= {3}
    for g, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
        nodes = slice(int(trees.offsets_B1[g]), int(trees.offsets_B1[g + 1]))
        wanted = searched(children, g, size, depth, **rules)
        assert dict(zip(paths_of(trees, g), trees.probs_N[nodes].tolist(), strict=True)) == wanted
        assert np.all(np.diff(trees.probs_N[nodes]) <= 0)


@pytest.mark.parametrize(
    ("width", "steps", "floor", "ties", "count"),
    [
        (1, 6, 0.0, False, 8),
        (2, 5, 0.02, True, 1),
        (4, 4, 0.2, False, 8),
        (4, 4, 0.0, True, 8),
        (5, 2, 0.02, False, 8),
        (3, 1, 0.2, True, 0),
        (7, 10, 0.0, True, 8),
    ],
)
def test_the_most_probable_are_chosen(width, steps, floor, ties, count) -> None:
    sizes, depths = [8, 0, 1, 3, 16, 40, 5, 63][:count], [5, 5, 5, 2, 5, 4, 1, 9][:count]
    children = some_children(width, ties=ties)
    rules = {"width": width, "floor": floor, "steps": steps}
    found = {
        name: grow(arrays, children, sizes, depths, **rules, padding=3 * (name == "device"))
        for name, arrays in ARRAYS.items()
    }
    trees = {
        name: each.trees(np.array(sizes, dtype=np.int64), source=3) for name, each in found.items()
    }
    check_searched(trees["host"], children, sizes, depths, **rules)
    for name in ("offsets_B1", "tokens_N", "parents_N", "depths_N", "masks_N", "probs_N"):
        assert np.array_equal(getattr(trees["host"], name), getattr(trees["device"], name)), name
    assert found["host"].num_nodes == found["device"].num_nodes
    assert found["host"].num_levels == found["device"].num_levels


def test_only_probabilities_above_zero_are_nodes_and_equal_ones_have_parents_first(arrays) -> None:
    def grown(*probs: float) -> Proposal:
        def children(tree: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
            return np.array([5, 6]), np.array(probs, dtype=np.float32)

        return grow(arrays, children, [3], [3], width=2, floor=0.0, steps=3)

    proposal = grown(np.nan, 0.0)
    assert proposal.num_nodes == proposal.num_levels == 0
    assert proposal.trees(np.array([3]), source=0).num_nodes == 0
    trees = grown(1.0, 0.0).trees(np.array([3]), 0)
    check_trees(trees)
    assert trees.parents_N.tolist() == [0, 1, 2]


# Which levels are grown at all


def grown(probs_GW: list[list[float]]) -> TreeGrowth:
    """Trees with the children of their roots."""
    probs = np.array(probs_GW, dtype=np.float32)
    count, width = probs.shape
    floor_1 = np.array([0.01], dtype=np.float32)
    growth = TreeGrowth(Arrays(), np.full(count, 8), np.full(count, 4), floor_1, width)
    growth.add(np.zeros((count, 1, width), dtype=np.int64), probs[:, None])
    return growth


def test_a_level_pays_for_what_its_rows_are_worth() -> None:
    pace = LevelPace()
    growth = grown([[0.5, 0.3], [0.2, 0.0]])
    pace.observe(0, growth)  # children had (0.8 + 0.2) of 2 roots
    growth.expand()
    token_ms_G = np.array([10.0, 5.0])
    assert pace.pays(1, growth, token_ms_G), "nothing is known of its time"
    worth = (0.8 * 10.0 + 0.2 * 5.0) * 0.5
    pace.observe_time(2, worth + 0.01)
    assert not pace.pays(1, growth, token_ms_G)
    assert pace.pays(1, growth, 1.01 * token_ms_G)
    pace.observe_time(2, worth - 0.05)
    assert pace.pays(1, growth, token_ms_G)
    assert pace.pays(1, grown([[0.1, 0.1]] * 3), np.full(3, 1e-9)), "of as many trees none was seen"
