"""Products with packed weights: the ops, their references, their layouts, and oneDNN's."""

from __future__ import annotations

import pytest
import torch

from rollout.models.layers.linear import FEW_ROWS, Linear
from rollout.models.layers.row_invariance import make_row_invariant
from rollout.ops.panel_matmul import native as few_rows
from rollout.ops.panel_matmul.native import panel_matmul
from rollout.ops.panel_matmul.reference import panel_matmul as panel_reference
from rollout.ops.panels import write_panels
from rollout.ops.tile_matmul.native import tile_matmul
from rollout.ops.tile_matmul.reference import tile_matmul as tile_reference
from tests.helpers.packing import needs_no_tiles, needs_tiles

needs_panels = pytest.mark.skipif(
    not few_rows.supports(torch.empty(1, 2).bfloat16(), torch.empty(1, 1, 128).bfloat16()),
    reason="needs AVX-512's bfloat16 products",
)
CPU = torch.device("cpu")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def panels_of(weight_OI: torch.Tensor) -> torch.Tensor:
    """Panels with units to spare, which hold garbage, as do the lanes of no output."""
    outputs, inputs = weight_OI.shape
    panels = torch.full((-(-outputs // 64), inputs // 2 + 3, 128), float("nan")).bfloat16()
    write_panels(panels, 0, weight_OI)
    return panels


def tiles_of(weight_OI: torch.Tensor) -> torch.Tensor:
    """Panels in whole tiles, whose lanes of no output hold garbage."""
    outputs, inputs = weight_OI.shape
    units = -(-inputs // 32) * 16
    panels = torch.zeros(-(-outputs // 32), units, 32, 2).bfloat16()
    panels[-1, :, (outputs - 1) % 32 + 1 :] = float("nan")
    panels = panels.view(*panels.shape[:2], 64)
    write_panels(panels, 0, weight_OI)
    return panels


@needs_panels
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(2, 1), (6, 5), (32, 64), (66, 65), (130, 96), (1100, 130)]
)
def test_few_rows_are_the_reference(inputs: int, outputs: int, set_threads) -> None:
    weight, bias = random(outputs, inputs, seed=1), random(outputs, seed=2)
    panels = panels_of(weight)
    for rows in (0, 1, 5, 6, 7, 12, 13, 31):
        set_threads(1 + rows % 2)
        x = random(rows, inputs + 3, seed=rows)[:, 1 : 1 + inputs]  # at odd addresses, odd strides
        for block in (2, 64) if inputs < 1000 else (64, 1024):
            for some in (None, bias):
                y = panel_matmul(x, panels, outputs, some, block)
                expected = panel_reference(x, panels, outputs, some, block)
                torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
                alone = [panel_matmul(row[None], panels, outputs, some, block) for row in x]
                assert torch.equal(y, torch.cat([y[:0], *alone])), "a row is its own"


@needs_tiles
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(2, 1), (31, 33), (32, 64), (37, 32), (66, 65), (320, 200), (1101, 130)],
)
def test_tiles_are_the_reference_bit_for_bit(inputs: int, outputs: int, set_threads) -> None:
    set_threads(1 + outputs % 2)
    weight, bias = random(outputs, inputs, seed=1), random(outputs, seed=2)
    tiles = tiles_of(weight)
    whole = random(70, inputs + 3, seed=3)[:, 1 : 1 + inputs]  # at odd addresses, of odd strides
    for some in (None, bias):
        expected = tile_reference(whole, tiles, outputs, some)
        for rows in (0, 1, 5, 15, 16, 17, 31, 32, 33, 48, 49, 64, 70):
            assert torch.equal(tile_matmul(whole[:rows], tiles, outputs, some), expected[:rows])
            last = slice(len(whole) - rows, None)  # the same rows elsewhere in a tile
            assert torch.equal(tile_matmul(whole[last], tiles, outputs, some), expected[last])


def test_the_references_are_products() -> None:
    weight, x, bias = random(70, 1100, seed=1), random(9, 1100, seed=2), random(70, seed=3)
    found = [panel_reference(x, panels_of(weight), 70, bias, block) for block in (2, 2048)]
    found.append(tile_reference(x, tiles_of(weight), 70, bias))
    expected = x.double() @ weight.double().T + bias.double()
    for y in found:
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


@needs_panels
@needs_no_tiles
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"),
    [(48, 80, True), (576, 192, False), (1024, 70, True), (3072, 70, False)],
)
@torch.inference_mode()
def test_bits_are_onednns(inputs: int, outputs: int, bias: bool, set_threads) -> None:
    """With the block that is found for a shape, for sums that cancel and values of any size."""
    linear = Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16, device=CPU)
    half = random(outputs, inputs // 2, seed=1)
    weight = torch.cat([half, -half.flip(1)], dim=1)
    weight[::3] *= 1e30
    linear.weight_rows(0, outputs).write(weight)
    if linear.bias_O is not None:
        linear.bias_O.copy_(random(outputs, seed=2) * 1e-5)
    linear.pack()
    make_row_invariant([linear], 300)
    assert linear.sum_block, "this oneDNN adds in an order that is not among those tried"
    half = random(100, inputs // 2, seed=3)
    x = torch.cat([half, half.flip(1)], dim=1)
    x[5], x[7, 1], x[8, 2] = 0.0, float("nan"), float("inf")
    whole = linear(x)
    for rows in range(1, FEW_ROWS + 1):
        set_threads(1 + rows % 2)
        y = linear(x[:rows])
        assert torch.equal(y.view(torch.int16), whole[:rows].view(torch.int16)), rows


@torch.inference_mode()
def test_few_rows_see_weights_that_were_written_and_woken() -> None:
    linear, x = (
        Linear(1536, 70, bias=True, dtype=torch.bfloat16, device=CPU),
        random(40, 1536, seed=3),
    )
    bias, blocks = random(70, seed=4), set()
    for seed in (1, 2):
        weight = random(70, 1536, seed=seed)
        linear.weight_rows(0, 70).write(weight)
        linear.bias_rows(0, 70).write(bias)
        linear.pack()
        least = make_row_invariant([linear], 64)
        assert not linear.multiplies_few_rows or least == 1
        assert linear.writes_in_place
        packed = linear._packed
        linear.weight_rows(3, 66).write(random(63, 1536, seed=5).float())  # of another dtype
        weight[3:66] = random(63, 1536, seed=5)
        assert linear._packed is packed
        assert torch.equal(linear.weight_rows(0, 70).read(), weight)
        expected = (x.float() @ weight.float().T + bias.float()).bfloat16()
        torch.testing.assert_close(linear(x), expected, rtol=2e-2, atol=2e-1)
        assert torch.equal(linear(x[:16])[:3], linear(x)[:3])
        blocks.add(linear.sum_block)
        assert linear.release() >= weight.nbytes
        linear.allocate()
    assert len(blocks) == 1
