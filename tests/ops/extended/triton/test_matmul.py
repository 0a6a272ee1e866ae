"""The row-invariant product. Unread memory beside rows and weights is NaN."""

from __future__ import annotations

import os

import pytest
import torch

from rollout.errors import ExactnessError
from rollout.models.layers.linear import Linear
from rollout.models.layers.row_invariance import disagreeing_tiles
from rollout.ops.gpu import multiprocessors
from rollout.ops.matmul import reference
from rollout.ops.matmul.tiles import Tile, tile_for, tiles
from rollout.ops.matmul.triton import matmul, tiled_matmul

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def operands(rows, outputs, features, dtype, device, seed=0):
    """Rows and weights inside wider NaN, and a bias."""
    generator = torch.Generator().manual_seed(seed)

    def inside_nan(count: int) -> torch.Tensor:
        memory = torch.full((count + 1, features + 16), torch.nan)
        memory[:count, :features] = torch.randn(count, features, generator=generator)
        return memory.to(device, dtype)[:count, :features]

    bias = torch.randn(outputs, generator=generator).to(device, dtype)
    return inside_nan(rows), inside_nan(outputs), bias


@pytest.mark.parametrize(
    ("rows", "outputs", "features", "has_bias"),
    [(1, 33, 128, True), (3, 70, 136, False), (65, 40, 100, True), (5, 8, 7, False)],
)
def test_matmul_is_the_reference(dtype, device, rows, outputs, features, has_bias) -> None:
    x, weight, bias = operands(rows, outputs, features, dtype, device)
    bias = bias if has_bias else None
    y = matmul(x, weight, bias)
    assert y.is_contiguous()
    expected = reference.matmul(x.cpu(), weight.cpu(), None if bias is None else bias.cpu())
    rtol = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=rtol, atol=rtol * features**0.5)


@pytest.mark.parametrize("tile", tiles(torch.float16), ids=str)
def test_a_program_walks_many_tiles(device, tile: Tile) -> None:
    rows = {0: 3, 16: 67}.get(tile.more_rows, 2 * tile.height + 3 if tile.height <= 32 else 3)
    x, weight, bias = operands(rows, 4 * tile.outputs + 1, 72, torch.float16, device)
    y = tiled_matmul(x, weight, bias, tile)
    expected = reference.matmul(x.cpu(), weight.cpu(), bias.cpu())
    rtol = 2 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("height", [80, 96, 160])
def test_both_blocks_of_a_tile_are_the_products(device, height: int) -> None:
    """Rows end in the first block of the second tile, and in its second."""
    tile = next(tile for tile in tiles(torch.float16) if tile.height == height)
    for rows in (height + 3, height + tile.rows + 5):
        x, weight, bias = operands(rows, 70, 40, torch.float16, device)
        x, weight = x.round(), weight.round()
        y = tiled_matmul(x, weight, bias, tile)
        expected = reference.matmul(x.cpu(), weight.cpu(), bias.cpu())
        assert torch.equal(y.cpu(), expected)


def test_a_row_is_the_same_alone_and_in_any_company(dtype, device) -> None:
    """In the interpreter with whole numbers: how its products add up depends on a row's place."""
    x, weight, bias = operands(61, 40, 200, dtype, device)
    if INTERPRETED:
        x, weight = x.round(), weight.round()
    together = matmul(x, weight, bias)
    order = torch.randperm(61, generator=torch.Generator().manual_seed(1))
    for count in (0, 1, 2, 7, 33):
        rows = order[:count].to(device)
        assert torch.equal(matmul(x[rows], weight, bias), together[rows])
    worse = x.clone()
    worse[1:] = torch.nan
    assert torch.equal(matmul(worse, weight, bias)[0], together[0])
    assert matmul(x, weight[:0], bias[:0]).shape == (61, 0)


@pytest.mark.skipif(INTERPRETED, reason="what tensor cores do inside shows on a GPU alone")
@pytest.mark.parametrize(("outputs", "features"), [(4096, 4096), (1000, 14336), (250, 203)])
def test_all_tiles_give_a_row_the_same_bits(dtype, device, outputs, features) -> None:
    """With sums that cancel, so that what is left is rounding alone."""
    x, weight, _ = operands(300, outputs, features, dtype, device)
    half = features // 2
    x[:, half : 2 * half] = x[:, :half].flip(1)
    weight[:, half : 2 * half] = -weight[:, :half].flip(1)
    x[:, 2 * half :] = 0
    expected = tiled_matmul(x, weight, None, tiles(dtype)[-1])
    for tile in tiles(dtype):
        for count in (1, 2, 16, 17, 64, 65, 128, 300):
            y = tiled_matmul(x[-count:], weight, None, tile)
            assert torch.equal(y, expected[-count:]), (tile, count)


def whole_numbers(device) -> tuple[Linear, torch.Tensor]:
    """Small ones, which every order adds up alike."""
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randint(-3, 4, (n, 24), generator=generator) for n in (70, 40))
    linear = Linear(24, 40, dtype=torch.float16, device=device, packing=False)
    linear.weight_rows(0, 40).write(weight)
    return linear, x.to(device, torch.float16)


def sabotage(monkeypatch, of_tile) -> None:
    def sabotaged(x, weight, bias, tile):
        return of_tile(tiled_matmul(x, weight, bias, tile), tile)

    monkeypatch.setattr("rollout.ops.matmul.triton.tiled_matmul", sabotaged)


def test_the_largest_set_of_tiles_that_agree_is_used(device, monkeypatch, caplog) -> None:
    product = whole_numbers(device)
    linear, x = product
    assert not disagreeing_tiles([product])
    assert not caplog.records
    processors = multiprocessors(device)
    wrong = tile_for(torch.float16, 65, 40, processors)
    replacing = tile_for(torch.float16, 65, 40, processors, {wrong})
    for bad in ({wrong: 1}, {wrong: 1, replacing: 2}):
        sabotage(monkeypatch, lambda y, tile, bad=bad: y + bad.get(tile, 0))
        caplog.clear()
        left_out = disagreeing_tiles([product])
        assert left_out == set(bad)
        assert len(caplog.records) == 1
        linear.left_out_tiles, linear.row_invariant = left_out, True
        ran: list[Tile] = []
        sabotage(monkeypatch, lambda y, tile, ran=ran: ran.append(tile) or y)
        for rows in (1, 17, 33, 65):
            linear(x[:rows])
        assert left_out.isdisjoint(ran)
        assert len(ran) == 4


def test_tiles_whose_rows_depend_on_their_place_are_refused(device, monkeypatch) -> None:
    linear, x = whole_numbers(device)
    places = torch.arange(70, device=device)[:, None]
    sabotage(monkeypatch, lambda y, tile: y + places[: len(y)])
    with pytest.raises(ExactnessError, match=r"24 -> 40.*exact=false"):
        disagreeing_tiles([(linear, x)])
