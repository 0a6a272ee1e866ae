"""Grouped products. Unread memory beside rows and weights is NaN."""

from __future__ import annotations

import os

import pytest
import torch

from rollout.ops.group_rows import group_rows
from rollout.ops.group_rows import reference as grouping_reference
from rollout.ops.grouped_matmul import reference as grouped_reference
from rollout.ops.grouped_matmul.triton import grouped_matmul, tiled_grouped_matmul
from rollout.ops.matmul.tiles import TWO_BLOCK_TILES, tiles
from rollout.ops.matmul.triton import tiled_matmul

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def grouped_operands(rows, chosen, num_experts, outputs, features, dtype, device, per_pair):
    """Some experts have no rows; rows and weights lie inside wider NaN."""
    generator = torch.Generator().manual_seed(rows)
    experts = torch.randint(0, max(1, num_experts - 1), (rows, chosen), generator=generator)
    experts[experts == 1] = 0
    count = rows * chosen if per_pair else rows
    x = torch.full((count + 1, features + 16), torch.nan)
    x[:count, :features] = torch.randn(count, features, generator=generator)
    weights = torch.full((num_experts, outputs + 1, features + 16), torch.nan)
    weights[:, :outputs, :features] = torch.randn(
        num_experts, outputs, features, generator=generator
    )
    return (
        x.to(device, dtype)[:count, :features],
        weights.to(device, dtype)[:, :outputs, :features],
        experts.to(device, torch.int32),
    )


@pytest.mark.parametrize(
    ("rows", "chosen", "num_experts", "outputs", "features", "per_pair"),
    [
        (1, 1, 1, 33, 128, False), (9, 3, 5, 70, 136, True), (50, 4, 3, 40, 100, False),
        (2, 2, 64, 8, 7, True), (90, 2, 6, 3 * 64 + 5, 32, False), (0, 2, 4, 9, 16, False),
    ],
)  # fmt: skip
def test_grouped_matmul_is_the_reference(
    dtype, device, rows, chosen, num_experts, outputs, features, per_pair
) -> None:
    """The last sizes but one make a program walk the tiles of many experts."""
    x, weights, experts = grouped_operands(
        rows, chosen, num_experts, outputs, features, dtype, device, per_pair
    )
    y = grouped_matmul(x, weights, group_rows(experts, num_experts))
    expected = grouped_reference.grouped_matmul(
        x.cpu(), weights.cpu(), group_rows(experts.cpu(), num_experts)
    )
    rtol = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=rtol, atol=rtol * features**0.5)


@pytest.mark.parametrize(
    ("rows", "chosen", "num_experts"), [(1, 1, 1), (40, 8, 128), (300, 7, 5), (0, 2, 3), (3, 2, 60)]
)
def test_pairs_are_grouped_as_by_a_stable_sort(device, rows, chosen, num_experts) -> None:
    generator = torch.Generator().manual_seed(rows)
    experts = torch.randint(0, num_experts, (rows, chosen), generator=generator, dtype=torch.int32)
    found = group_rows(experts.to(device), num_experts)
    expected = grouping_reference.group_rows(experts, num_experts)
    for name in ("pairs_S", "offsets_N1"):
        tensor = getattr(found, name)
        assert tensor.dtype is getattr(expected, name).dtype
        assert torch.equal(tensor.cpu(), getattr(expected, name))


def test_a_pair_has_the_bits_of_its_row_and_expert(compared_dtype, device) -> None:
    """The bits are those of ops.matmul: alone, in any company, in any order, in every tile."""
    x, weights, experts = grouped_operands(21, 2, 4, 40, 104, compared_dtype, device, False)
    one_block = [tile for tile in tiles(compared_dtype) if tile not in TWO_BLOCK_TILES]
    for tile in one_block[: 1 if INTERPRETED else None]:
        y = tiled_grouped_matmul(x, weights, group_rows(experts, 4), tile).view(21, 2, 40)
        for row in (0, 13, 20):
            for rank in range(2):
                expert = int(experts[row, rank])
                alone = tiled_matmul(x[row : row + 1], weights[expert], None, tile)
                assert torch.equal(alone[0], y[row, rank])
        order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).to(device)
        for count in (1, 8, 21):
            some = order[:count]
            groups = group_rows(experts[some], 4)
            part = tiled_grouped_matmul(x[some], weights, groups, tile)
            assert torch.equal(part.view(count, 2, 40), y[some])
        worse = x.clone()
        worse[1:] = torch.nan
        broken = tiled_grouped_matmul(worse, weights, group_rows(experts, 4), tile)
        assert torch.equal(broken.view(21, 2, 40)[0], y[0])
