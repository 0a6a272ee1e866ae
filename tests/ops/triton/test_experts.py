"""Routing, grouped products and their sum. Unread memory beside rows and weights is NaN."""

from __future__ import annotations

import os

import pytest
import torch

from rollout.ops.combine_experts import reference as combine_reference
from rollout.ops.combine_experts.triton import combine_experts
from rollout.ops.grouped_matmul import RowGroups, triton
from rollout.ops.grouped_matmul import reference as grouped_reference
from rollout.ops.grouped_matmul.triton import grouped_matmul, tiled_grouped_matmul
from rollout.ops.matmul.tiles import TWO_BLOCK_TILES, tiles
from rollout.ops.matmul.triton import tiled_matmul
from rollout.ops.routing import reference as routing_reference
from rollout.ops.routing.triton import route

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("num_experts", "chosen"), [(1, 1), (7, 3), (64, 8)])
def test_route_is_the_reference(dtype, device, num_experts, chosen, normalizes) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.full((6, num_experts + 3), torch.nan).to(dtype)
    logits[:, :num_experts] = torch.randn(6, num_experts, generator=generator)
    logits[3, :num_experts] = 1.5  # all alike
    logits[4, :num_experts] = logits[4, :num_experts].round()
    logits = logits.to(device)[:, :num_experts]
    experts, weights = route(logits, chosen, normalizes)
    wanted, wanted_weights = routing_reference.route(logits.cpu(), chosen, normalizes)
    assert experts.dtype is torch.int32
    assert torch.equal(experts.cpu(), wanted)
    torch.testing.assert_close(weights.cpu(), wanted_weights, rtol=1e-5, atol=1e-7)
    for row in range(6):
        alone_experts, alone_weights = route(logits[row : row + 1], chosen, normalizes)
        assert torch.equal(alone_experts[0], experts[row])
        assert torch.equal(alone_weights[0], weights[row])
    assert route(logits[:0], chosen, normalizes)[0].shape == (0, chosen)


def test_broken_rows_get_experts_that_exist(device) -> None:
    for value in (torch.nan, -torch.inf, torch.inf):
        experts, _ = route(torch.full((2, 5), value, device=device), 3, True)
        assert ((experts >= 0) & (experts < 5)).all()


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


@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize(
    ("rows", "chosen", "num_experts", "outputs", "features"),
    [(1, 1, 1, 33, 128), (9, 3, 5, 70, 136), (50, 4, 3, 40, 100), (2, 2, 64, 8, 7)],
)
def test_grouped_matmul_is_the_reference(
    dtype, device, rows, chosen, num_experts, outputs, features, per_pair
) -> None:
    x, weights, experts = grouped_operands(
        rows, chosen, num_experts, outputs, features, dtype, device, per_pair
    )
    y = grouped_matmul(x, weights, RowGroups.of(experts, num_experts))
    expected = grouped_reference.grouped_matmul(
        x.cpu(), weights.cpu(), RowGroups.of(experts.cpu(), num_experts)
    )
    rtol = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=rtol, atol=rtol * features**0.5)


def test_a_pair_has_the_bits_of_its_row_and_expert(compared_dtype, device) -> None:
    """Those of ops.matmul: alone, in any company, in any order, in every tile."""
    x, weights, experts = grouped_operands(21, 2, 4, 40, 104, compared_dtype, device, False)
    one_block = [tile for tile in tiles(compared_dtype) if tile not in TWO_BLOCK_TILES]
    for tile in one_block[: 1 if INTERPRETED else None]:
        y = tiled_grouped_matmul(x, weights, RowGroups.of(experts, 4), tile).view(21, 2, 40)
        for row in (0, 13, 20):
            for rank in range(2):
                expert = int(experts[row, rank])
                alone = tiled_matmul(x[row : row + 1], weights[expert], None, tile)
                assert torch.equal(alone[0], y[row, rank])
        order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).to(device)
        for count in (1, 8, 21):
            some = order[:count]
            groups = RowGroups.of(experts[some], 4)
            part = tiled_grouped_matmul(x[some], weights, groups, tile)
            assert torch.equal(part.view(count, 2, 40), y[some])
        worse = x.clone()
        worse[1:] = torch.nan
        broken = tiled_grouped_matmul(worse, weights, RowGroups.of(experts, 4), tile)
        assert torch.equal(broken.view(21, 2, 40)[0], y[0])


def test_a_program_walks_the_tiles_of_many_experts(dtype, device) -> None:
    x, weights, experts = grouped_operands(90, 2, 6, 3 * 64 + 5, 32, dtype, device, False)
    y = grouped_matmul(x, weights, RowGroups.of(experts, 6))
    expected = grouped_reference.grouped_matmul(
        x.cpu(), weights.cpu(), RowGroups.of(experts.cpu(), 6)
    )
    rtol = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=rtol, atol=1e-4)


def test_tiles_that_are_left_out_are_not_used(compared_dtype, device, monkeypatch) -> None:
    x, weights, experts = grouped_operands(21, 2, 4, 40, 104, compared_dtype, device, False)
    groups, ran = RowGroups.of(experts, 4), []
    monkeypatch.setattr(triton, "tiled_grouped_matmul", lambda *call: ran.append(call[-1]))
    triton.grouped_matmul(x, weights, groups)
    triton.grouped_matmul(x, weights, groups, {ran[0]})
    assert ran[0] != ran[1]


def test_no_rows(device, dtype) -> None:
    x, weights, experts = grouped_operands(3, 2, 4, 9, 16, dtype, device, False)
    assert grouped_matmul(x[:0], weights, RowGroups.of(experts[:0], 4)).shape == (0, 9)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("rows", "ranks", "hidden"), [(1, 1, 1), (5, 3, 37), (3, 8, 1030)])
def test_combine_experts_is_the_reference(dtype, device, rows, ranks, hidden, shared) -> None:
    generator = torch.Generator().manual_seed(hidden)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    outputs, weights = random(rows, ranks, hidden), random(rows, ranks).float().softmax(1)
    of_shared = (random(rows, hidden), random(rows, 3)[:, 1]) if shared else (None, None)
    out = combine_experts(outputs, weights, *of_shared)
    expected = combine_reference.combine_experts(outputs, weights, *of_shared)
    rtol = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=rtol, atol=1e-6)
    assert combine_experts(outputs[:0], weights[:0], None, None).shape == (0, hidden)
