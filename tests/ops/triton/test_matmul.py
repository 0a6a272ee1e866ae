"""The row-invariant product. Unread memory beside rows and weights is NaN."""

from __future__ import annotations

import os

import pytest
import torch

from rollout.layers.linear import Linear
from rollout.layers.row_invariance import _differing_tiles
from rollout.ops.gpu import multiprocessors
from rollout.ops.matmul import reference
from rollout.ops.matmul.triton import matmul, tile_for, tiled_matmul, tiles, tiles_up_to

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
    ("rows", "outputs", "features"), [(1, 33, 128), (3, 70, 136), (65, 40, 100), (5, 8, 7)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_matmul_is_the_reference(dtype, device, rows, outputs, features, has_bias) -> None:
    x, weight, bias = operands(rows, outputs, features, dtype, device)
    bias = bias if has_bias else None
    y = matmul(x, weight, bias)
    assert y.is_contiguous()
    expected = reference.matmul(x.cpu(), weight.cpu(), None if bias is None else bias.cpu())
    rtol = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=rtol, atol=rtol * features**0.5)


@pytest.mark.parametrize("index", range(10))
def test_a_program_walks_many_tiles(dtype, device, index: int) -> None:
    if index >= len(tiles(dtype)):
        pytest.skip("this dtype has fewer tiles")
    tile = tiles(dtype)[index]
    rows = 2 * tile.rows + 3 if tile.rows <= 32 else 3
    x, weight, bias = operands(rows, 4 * tile.outputs + 1, 72, dtype, device)
    y = tiled_matmul(x, weight, bias, tile)
    expected = reference.matmul(x.cpu(), weight.cpu(), bias.cpu())
    rtol = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=rtol, atol=1e-4)


def test_tiles_fill_the_multiprocessors_of_a_hopper() -> None:
    """With products of an 8B model's shapes, at any number of rows."""
    for outputs in (4096, 6144, 28672, 128256):
        for rows in (1, 8, 16, 17, 32, 33, 64, 65, 72, 96, 128, 129, 256, 512, 8192):
            tile = tile_for(torch.bfloat16, rows, outputs, 132)
            share = tile.share(outputs, 132)
            assert share % 16 == 0
            tiles_of_it = -(-rows // tile.rows) * -(-outputs // share)
            assert tiles_of_it >= 64, (rows, outputs, tile)
            assert tile.rows < 2 * max(rows, 16)


def test_a_row_is_the_same_alone_and_in_any_company(dtype, device) -> None:
    """In the interpreter with whole numbers: how its products add up depends on a row's place."""
    x, weight, bias = operands(61, 40, 200, dtype, device)
    if INTERPRETED:
        x, weight = x.round(), weight.round()
    together = matmul(x, weight, bias)
    order = torch.randperm(61, generator=torch.Generator().manual_seed(1))
    for count in (1, 2, 7, 33):
        rows = order[:count].to(device)
        assert torch.equal(matmul(x[rows], weight, bias), together[rows])
    worse = x.clone()
    worse[1:] = torch.nan
    assert torch.equal(matmul(worse, weight, bias)[0], together[0])


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


def test_nothing_to_multiply(dtype, device) -> None:
    x, weight, bias = operands(2, 5, 9, dtype, device)
    assert matmul(x[:0], weight, bias).shape == (0, 5)
    assert matmul(x, weight[:0], bias[:0]).shape == (2, 0)


def test_a_tile_that_adds_otherwise_is_named(dtype, device, monkeypatch) -> None:
    """With small whole numbers, which every order adds up alike."""
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randint(-3, 4, (n, 24), generator=generator) for n in (70, 40))
    linear = Linear(24, 40, dtype=dtype, device=device, packing=False)
    linear.weight_rows(0, 40).write(weight)
    x, y = x.to(device, dtype), (x @ weight.T).to(device, dtype)
    assert not _differing_tiles(linear, x, y, 70)
    wrong = tiles_up_to(dtype, 70, 40, multiprocessors(device))[-1]

    def sabotaged(x, weight, bias, tile):
        return tiled_matmul(x, weight, bias, tile) + (tile == wrong)

    monkeypatch.setattr("rollout.ops.matmul.triton.tiled_matmul", sabotaged)
    assert _differing_tiles(linear, x, y, 70) == [wrong]
