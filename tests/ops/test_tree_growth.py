"""Trees that grow, compiled and on a GPU, against the reference: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.ops.tree_growth import TreeGrowth, choose_nodes, reference
from rollout.ops.tree_growth.arrays import TreeArrays


def random_probs(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """With zeros, ones, equal ones and NaN among them."""
    probs = torch.rand(shape, generator=generator)
    kind = torch.randint(8, shape, generator=generator)
    for value, of_kind in ((0.0, 0), (1.0, 1), (0.5, 2), (float("nan"), 3)):
        probs[kind == of_kind] = value
    return probs


@pytest.mark.parametrize(
    ("trees", "topk", "levels"), [(0, 4, 3), (1, 1, 6), (1, 4, 4), (7, 3, 5), (5, 9, 3)]
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_growth_is_the_references(device, trees, topk, levels, is_shared) -> None:
    generator = torch.Generator().manual_seed(topk)
    sizes_G = torch.randint(40, (trees,), generator=generator).to(device)
    depths_G = torch.randint(1, levels + 1, (trees,), generator=generator).to(device)
    floor_1 = torch.tensor([0.01], device=device)
    growth = TreeGrowth(sizes_G, depths_G, floor_1, topk, levels)
    arrays = TreeArrays.of(sizes_G, depths_G, floor_1, topk, levels)
    for level in range(levels):
        rows = arrays.rows(level)
        shape = trees, 1 if is_shared else rows, topk
        tokens = torch.randint(1 << 20, shape, generator=generator).to(device)
        probs = random_probs(generator, *shape).to(device)
        growth.add(tokens, probs)
        wanted = (each.expand(-1, rows, -1) for each in (tokens, probs))
        reference.add(arrays, level, *wanted)
        assert torch.equal(growth.tokens_GC, arrays.tokens_GC[:, : growth.tokens_GC.shape[1]])
        assert torch.equal(growth.probs_GC, arrays.probs_GC[:, : growth.probs_GC.shape[1]])
        if level + 1 < levels:
            nodes = growth.expand()
            reference.expand(arrays, level + 1)
            own = slice(topk * (level + 1))
            found = (nodes.tokens_GN, nodes.parents_GN, nodes.masks_GN, nodes.is_node_GN)
            for one, other in zip(found, arrays[5:9], strict=True):
                assert torch.equal(one, other[:, own])
    last = topk * (levels - 1)
    assert torch.equal(growth.candidates_GN, arrays.node_candidates_GN[:, :last])
    results = [each.cpu().numpy() for each in growth.results().values()]
    given = (*results, sizes_G.cpu().numpy(), topk)
    for one, other in zip(choose_nodes(*given), reference.choose_nodes(*given), strict=True):
        np.testing.assert_array_equal(one, other)
