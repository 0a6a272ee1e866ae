"""Acceptance along trees, on the CPU and on a GPU, against a slow walk of each."""

from __future__ import annotations

import random

import pytest
import torch

from rollout.ops.tree_accept import accept
from rollout.ops.tree_accept.reference import walk

Tree = tuple[list[int], list[int], list[int]]  # tokens, parents, samples


def slow_walk(tokens: list[int], parents: list[int], sampled: list[int]) -> list[int]:
    path, node = [], 0
    while sampled:
        children = [
            child
            for child, parent in enumerate(parents, start=1)
            if parent == node and tokens[child - 1] == sampled[node]
        ]
        if not children:
            break
        node = children[0]
        path.append(node)
    return path


def random_trees(seed: int, vocab: int) -> list[Tree]:
    """Chains and bushes of 0 to 63 nodes, with equal siblings; some entries do not sample."""
    rng = random.Random(seed)
    trees = []
    for _ in range(25):
        nodes = rng.choice([0, 1, 2, 7, 20, 63])
        back = rng.choice([1, 3, 63])
        parents = [rng.randint(max(0, j + 1 - back), j) for j in range(nodes)]
        tokens = [rng.randrange(vocab) for _ in range(nodes)]
        samples = nodes > 0 or rng.random() < 0.7
        sampled = [rng.randrange(-1, vocab) for _ in range(nodes + 1)] if samples else []
        trees.append((tokens, parents, sampled))
    return trees


def mask_of(parents: list[int], node: int) -> int:
    return 1 if node == 0 else mask_of(parents, parents[node - 1]) | 1 << node


def flat(trees: list[Tree], device: torch.device) -> list[torch.Tensor]:
    def offsets(counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    masks = [mask_of(parents, j + 1) for _, parents, _ in trees for j in range(len(parents))]
    tensors = [
        torch.tensor([s for *_, sampled in trees for s in sampled], dtype=torch.int64),
        offsets([len(sampled) for *_, sampled in trees]),
        torch.tensor([t for tokens, *_ in trees for t in tokens], dtype=torch.int32),
        torch.tensor([p for _, parents, _ in trees for p in parents], dtype=torch.int32),
        torch.tensor([m - 2**64 if m >= 2**63 else m for m in masks], dtype=torch.int64),
        offsets([len(tokens) for tokens, *_ in trees]),
    ]
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize(("seed", "vocab"), [(0, 2), (1, 3), (2, 1), (3, 50)])
def test_accept_is_the_slow_walk(device, seed: int, vocab: int) -> None:
    trees = random_trees(seed, vocab)
    paths, lengths = accept(*flat(trees, device))
    for tree, path, length in zip(trees, paths.tolist(), lengths.tolist(), strict=True):
        expected = slow_walk(*tree)
        assert path == expected + [0] * (63 - len(expected))
        assert length == len(expected)
        assert not tree[2] or walk(*tree) == expected
    assert lengths.max() > 1 or vocab == 50


def test_a_chain_of_63_is_accepted_whole_and_no_entries_pass(device) -> None:
    chain = (list(range(63)), list(range(63)), [*range(63), 7])
    paths, lengths = accept(*flat([chain, ([], [], [3])], device))
    assert lengths.tolist() == [63, 0]
    assert paths[0].tolist() == list(range(1, 64))
    assert not paths[1].any()
    paths, lengths = accept(*flat([], device))
    assert (paths.shape, lengths.shape) == ((0, 63), (0,))
