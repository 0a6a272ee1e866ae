"""Acceptance on the device against the walk of one tree."""

from __future__ import annotations

import random

import pytest
import torch

from rollout.ops.tree_accept import reference
from rollout.ops.tree_accept import triton as tree_accept


def random_trees(seed: int, entries: int, vocab: int):
    """Chains and bushes of 0 to 63 nodes, with equal siblings; some entries do not sample."""
    rng = random.Random(seed)
    trees = []
    for _ in range(entries):
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


def flat(trees, device: torch.device) -> list[torch.Tensor]:
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
def test_accept_is_the_walk(device, seed: int, vocab: int) -> None:
    trees = random_trees(seed, 25, vocab)
    for op in (tree_accept.accept, reference.accept):
        paths, lengths = op(*flat(trees, device))
        for (tokens, parents, sampled), path, length in zip(
            trees, paths.tolist(), lengths.tolist(), strict=True
        ):
            expected = reference.walk(tokens, parents, sampled) if sampled else []
            assert path == expected + [0] * (63 - len(expected))
            assert length == len(expected)


def test_a_chain_of_63_is_accepted_whole(device) -> None:
    chain = (list(range(63)), list(range(63)), [*range(63), 7])
    paths, lengths = tree_accept.accept(*flat([chain, ([], [], [3])], device))
    assert lengths.tolist() == [63, 0]
    assert paths[0].tolist() == list(range(1, 64))
    assert not paths[1].any()


def test_no_entries(device) -> None:
    paths, lengths = tree_accept.accept(*flat([], device))
    assert paths.shape == (0, 63)
    assert lengths.shape == (0,)
