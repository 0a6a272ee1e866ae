"""The invariants of draft trees, and their paths."""

from __future__ import annotations

from rollout.types import DraftTrees

Path = tuple[int, ...]
"""The tokens from the root down to a node."""


def check_trees(trees: DraftTrees) -> None:
    """Assert the invariants verification relies on.

    Parents precede children, masks are the parent's plus the node itself, depths grow by one, and
    no tree has more nodes than a mask has bits.
    """
    for b in range(len(trees.offsets_B1) - 1):
        first, last = int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1])
        assert 0 <= last - first < 64
        masks, depths = [1], [0]
        for j, node in enumerate(range(first, last), start=1):
            parent = int(trees.parents_N[node])
            assert 0 <= parent < j
            masks.append(masks[parent] | 1 << j)
            depths.append(depths[parent] + 1)
            assert int(trees.masks_N[node]) == masks[j]
            assert int(trees.depths_N[node]) == depths[j]


def paths_of(trees: DraftTrees, b: int) -> list[Path]:
    """The path of each node of an entry's tree."""
    found: list[Path] = [()]
    for node in range(int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1])):
        found.append((*found[trees.parents_N[node]], int(trees.tokens_N[node])))
    return found[1:]
