"""Trees grown in fixed shapes are those `TreeGrowth` grows, whatever stands in the padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from spec_workers.neural.device_growth import DeviceGrowth
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.read_proposal import ReadProposal
from spec_workers.neural.tree_growth import TreeGrowth
from tests.helpers.requests import decode_batch
from tests.helpers.tree_checks import check_trees

Path = tuple[int, ...]
Children = Callable[[int, Path], tuple[np.ndarray, np.ndarray]]


def some_children(width: int, *, ties: bool = False) -> Children:
    """Tokens and probabilities below a path, the most probable first: a function of the path."""

    def children(tree: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng([tree, 7, *path])
        probs = random.dirichlet(np.full(width + 1, 0.3))[:width].astype(np.float32)
        if ties:
            probs = random.choice(np.array([0.0, 0.25, 0.5, 1.0], dtype=np.float32), width)
        return random.permutation(50)[:width], np.sort(probs)[::-1].copy()

    return children


def on_host(children: Children, sizes, depths, *, width, floor, steps):
    growth = TreeGrowth(
        np.array(sizes, dtype=np.int64), np.array(depths, dtype=np.int64), topk=width,
        max_nodes=max(1, width * (steps - 1)), floor=floor,
    )  # fmt: skip
    paths: list[Path] = [()] * len(sizes)
    trees = list(range(len(sizes)))
    level, nodes = None, 0
    for left in reversed(range(steps)):
        found = [children(tree, path) for tree, path in zip(trees, paths, strict=True)]
        tokens = np.array([each[0] for each in found], dtype=np.int64).reshape(-1, width)
        probs = np.array([each[1] for each in found], dtype=np.float32).reshape(-1, width)
        growth.add(level, tokens, probs)
        if not left:
            break
        level = growth.expand()
        rows = zip(level.parent_rows_F.tolist(), level.tokens_F.tolist(), strict=True)
        paths = [(*paths[parent], token) for parent, token in rows]
        trees = level.trees_F.tolist()
        nodes += len(trees)
    return growth.finish(source=3), nodes


def on_device(children: Children, sizes, depths, *, width, floor, steps, padding=0):
    """Padding trees, and rows that are no nodes, get probabilities of NaN or one in turn."""
    count = len(sizes) + padding
    growth = DeviceGrowth(
        torch.tensor([*sizes, *[0] * padding]),
        torch.tensor([*depths, *[0] * padding]),
        torch.tensor([max(floor, float(np.finfo(np.float32).tiny))]),
        width,
    )
    paths: list[list[Path | None]] = [[()] if g < len(sizes) else [None] for g in range(count)]
    masks: dict[tuple[int, int], Path] = {}
    for level in range(steps):
        shape = (count, len(paths[0]), width)
        tokens = torch.full(shape, -9)
        probs = torch.full(shape, float("nan") if level % 2 else 1.0)
        for g, own in enumerate(paths):
            for f, path in enumerate(own):
                if path is not None:
                    own_tokens, own_probs = children(g, path)
                    tokens[g, f] = torch.from_numpy(own_tokens)
                    probs[g, f] = torch.from_numpy(own_probs)
        growth.add(tokens, probs)
        if level + 1 == steps:
            break
        nodes = growth.expand()
        first = level * width
        before, paths = paths, []
        for g in range(count):
            paths.append([])
            for n in range(first, first + width):
                if not nodes.is_node_GN[g, n]:
                    assert int(nodes.masks_GN[g, n]) % 2**64 == 1 | 2 << n
                    assert nodes.tokens_GN[g, n] == 0
                    paths[g].append(None)
                    continue
                parent = int(nodes.parents_GN[g, n])
                above = () if parent < 0 else before[g][parent - first + width]
                assert above is not None
                paths[g].append((*above, int(nodes.tokens_GN[g, n])))
                masks[g, n] = paths[g][-1]
                mask = int(nodes.masks_GN[g, n]) % 2**64
                on_path = [masks[g, j] for j in range(n + 1) if mask >> (j + 1) & 1]
                assert on_path == [masks[g, n][:k] for k in range(1, level + 2)]
                assert mask & 1
    return read_of(growth, len(sizes), width)


def read_of(growth: DeviceGrowth, count: int, width: int) -> ReadProposal:
    none = np.zeros((count, 0, 0), dtype=np.float32)
    return ReadProposal(
        batch=decode_batch([]), entries_G=[], guesser=Guesser(width, None), topk=width,
        tokens_GC=growth.tokens_GC[:count].int().numpy(), probs_GC=growth.probs_GC[:count].numpy(),
        candidates_GN=growth.candidates_GN[:count].int().numpy(),
        index_GRK=none.astype(np.int32), probs_GRK=none, ends_GRK=none,
    )  # fmt: skip


def check_alike(trees, wanted) -> None:
    check_trees(trees)
    for name in ("offsets_B1", "tokens_N", "parents_N", "depths_N", "masks_N", "probs_N"):
        assert np.array_equal(getattr(trees, name), getattr(wanted, name)), name
    assert trees.sources_N.tolist() == wanted.sources_N.tolist()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.02, 0.2])
@pytest.mark.parametrize(("width", "steps"), [(1, 6), (2, 5), (4, 4), (5, 2), (3, 1), (7, 10)])
def test_the_same_trees(width, steps, floor, ties) -> None:
    sizes = [8, 0, 1, 3, 16, 40, 5, 63]
    depths = [5, 5, 5, 2, 5, 4, 1, 9]
    children = some_children(width, ties=ties)
    wanted, nodes = on_host(children, sizes, depths, width=width, floor=floor, steps=steps)
    read = on_device(children, sizes, depths, width=width, floor=floor, steps=steps, padding=3)
    check_alike(read.trees(np.array(sizes), source=3), wanted)
    assert read.num_nodes == nodes


@pytest.mark.parametrize(("count", "padding"), [(0, 1), (1, 0), (1, 1), (3, 0), (3, 1)])
def test_few_trees_or_none(count, padding) -> None:
    sizes, depths = [6] * count, [3] * count
    children = some_children(4)
    wanted, _ = on_host(children, sizes, depths, width=4, floor=0.0, steps=3)
    read = on_device(children, sizes, depths, width=4, floor=0.0, steps=3, padding=padding)
    check_alike(read.trees(np.array(sizes, dtype=np.int64), source=3), wanted)


def test_what_is_no_probability_is_no_node() -> None:
    def children(tree: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
        return np.array([5, 6]), np.array([np.nan, 0.0], dtype=np.float32)

    read = on_device(children, [3], [3], width=2, floor=0.0, steps=3)
    assert read.num_nodes == read.num_levels == 0
    assert read.trees(np.array([3]), source=0).num_nodes == 0


def test_company_changes_no_tree() -> None:
    children = some_children(4, ties=True)
    sizes, depths = [9, 30, 4], [4, 2, 3]
    read = on_device(children, sizes, depths, width=4, floor=0.01, steps=4)
    together = read.trees(np.array(sizes), source=0)
    first = together.offsets_B1[1]
    alone = on_device(children, sizes[:1], depths[:1], width=4, floor=0.01, steps=4, padding=2)
    own = alone.trees(np.array(sizes[:1]), source=0)
    assert together.tokens_N[:first].tolist() == own.tokens_N.tolist()
    assert together.masks_N[:first].tolist() == own.masks_N.tolist()
