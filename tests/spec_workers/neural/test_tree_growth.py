"""Trees grown in fixed shapes against a plain search over the same made-up draft."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rollout.ops.tree_growth import TreeGrowth
from spec_workers.neural.level_pace import LevelPace
from spec_workers.neural.proposal import Proposal
from tests.helpers.requests import decode_batch
from tests.helpers.tree_checks import Path, check_trees, paths_of

Children = Callable[[int, Path], tuple[np.ndarray, np.ndarray]]


@pytest.fixture(autouse=True, params=["compiled", "reference"])
def implementation(request, monkeypatch) -> None:
    """Each test with either implementation of the op."""
    if request.param == "reference":
        monkeypatch.setattr("rollout.ops.tree_growth.native.cpu", None)


def some_children(width: int, *, ties: bool = False) -> Children:
    """Tokens and probabilities below a path, the most probable first: a function of the path."""

    def children(tree: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng([tree, 7, *path])
        probs = random.dirichlet(np.full(width + 1, 0.3))[:width].astype(np.float32)
        if ties:
            probs = random.choice(np.array([0.0, 0.25, 0.5, 1.0], dtype=np.float32), width)
        return random.permutation(50)[:width], np.sort(probs)[::-1].copy()

    return children


def grow(children, sizes, depths, *, width, floor, steps, padding=0) -> Proposal:
    """Padding trees, and rows that are no nodes, get probabilities of NaN or one in turn."""
    count = len(sizes) + padding

    floor_1 = np.array([max(floor, float(np.finfo(np.float32).tiny))], dtype=np.float32)
    sizes_G = np.array([*sizes, *[0] * padding], dtype=np.int64)
    depths_G = np.array([*depths, *[0] * padding], dtype=np.int64)
    growth = TreeGrowth(*map(torch.from_numpy, (sizes_G, depths_G, floor_1)), width, steps)
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
        growth.add(torch.from_numpy(tokens), torch.from_numpy(probs))
        if level + 1 == steps:
            break
        paths = check_level(growth.expand(), level, width, paths, nodes_run)
    own = slice(len(sizes))
    return Proposal(
        batch=decode_batch([]), entries_G=[], topk=width,
        tokens_GC=growth.tokens_GC[own].numpy(), probs_GC=growth.probs_GC[own].numpy(),
        candidates_GN=growth.candidates_GN[own].numpy(),
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
        expanded = sorted(frontier, key=lambda each: -each[1])[: width if level else None]
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
    for padding in (0, 3):
        proposal = grow(children, sizes, depths, **rules, padding=padding)
        trees = proposal.trees(np.array(sizes, dtype=np.int64), source=3)
        check_searched(trees, children, sizes, depths, **rules)


def test_only_probabilities_above_zero_are_nodes_and_equal_ones_have_parents_first() -> None:
    def grown(*probs: float) -> Proposal:
        def children(tree: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
            return np.array([5, 6]), np.array(probs, dtype=np.float32)

        return grow(children, [3], [3], width=2, floor=0.0, steps=3)

    proposal = grown(np.nan, 0.0)
    assert proposal.num_nodes == proposal.num_levels == 0
    assert proposal.trees(np.array([3]), source=0).num_nodes == 0
    trees = grown(1.0, 0.0).trees(np.array([3]), 0)
    check_trees(trees)
    assert trees.parents_N.tolist() == [0, 1, 2]


# Which levels are grown at all


def grown(probs_GW: list[list[float]]) -> TreeGrowth:
    """Trees with the children of their roots."""
    probs = torch.tensor(probs_GW)
    count, width = probs.shape
    sizes, depths = torch.full((count,), 8), torch.full((count,), 4)
    growth = TreeGrowth(sizes, depths, torch.tensor([0.01]), width, 2)
    growth.add(torch.zeros(count, 1, width, dtype=torch.int64), probs[:, None])
    return growth


def test_a_level_pays_for_what_its_rows_are_worth(monkeypatch) -> None:
    now = iter([0.0, 0.006])  # a level takes 6 ms
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    pace, growth = LevelPace(), grown([[0.5, 0.3], [0.2, 0.0]])
    pace.observe(0, growth)  # children had (0.8 + 0.2) of 2 roots
    growth.expand()
    token_ms_G = np.array([10.0, 5.0])  # worth (0.8 * 10 + 0.2 * 5) * 0.5 = 4.5 ms
    assert pace.pays(1, growth, token_ms_G), "nothing is known of its time"
    with pace.timed(2):
        pass
    assert not pace.pays(1, growth, token_ms_G)
    assert pace.pays(1, growth, 1.4 * token_ms_G)
    assert any(pace.pays(1, growth, token_ms_G) for _ in range(64)), "its time may have changed"
