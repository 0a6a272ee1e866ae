"""Products by tiles: the op, its reference, and weights in its layout."""

from __future__ import annotations

import pytest
import torch

from rollout.models.layers.linear import Linear
from rollout.models.layers.row_invariance import make_row_invariant
from rollout.models.layers.tiled_weight import TiledWeight
from rollout.ops.panels import write_panels
from rollout.ops.tile_matmul import native, reference
from rollout.ops.tile_matmul.native import tile_matmul
from tests.helpers.packing import needs_tiles

CPU = torch.device("cpu")
SIZES = [
    (2, 1), (6, 5), (31, 33), (32, 64), (37, 32), (66, 65), (130, 96), (320, 200), (1101, 130),
]  # fmt: skip


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def panels_of(weight_OI: torch.Tensor) -> torch.Tensor:
    """Panels whose lanes of no output hold garbage."""
    outputs, inputs = weight_OI.shape
    units = -(-inputs // 32) * 16
    panels = torch.zeros(-(-outputs // 32), units, 32, 2).bfloat16()
    panels[-1, :, (outputs - 1) % 32 + 1 :] = float("nan")
    panels = panels.view(*panels.shape[:2], 64)
    write_panels(panels, 0, weight_OI)
    return panels


@needs_tiles
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_the_op_is_the_reference_bit_for_bit(
    inputs: int, outputs: int, threads: int, set_threads
) -> None:
    set_threads(threads)
    weight, bias = random(outputs, inputs, seed=1), random(outputs, seed=2)
    panels = panels_of(weight)
    whole = random(70, inputs + 3, seed=3)[:, 1 : 1 + inputs]  # at odd addresses, of odd strides
    for some in (None, bias):
        expected = reference.tile_matmul(whole, panels, outputs, some)
        for rows in (0, 1, 5, 15, 16, 17, 31, 32, 33, 48, 49, 64, 70):
            assert torch.equal(tile_matmul(whole[:rows], panels, outputs, some), expected[:rows])
            last = whole[len(whole) - rows :]  # the same rows elsewhere in a tile
            y = tile_matmul(last, panels, outputs, some)
            assert torch.equal(y, expected[len(whole) - rows :])


@needs_tiles
@pytest.mark.parametrize("inputs", [20, 32, 50])
def test_what_is_not_finite_stays_in_its_row_and_output(inputs: int) -> None:
    weight, x = random(70, inputs, seed=1), random(40, inputs, seed=2)
    clean = tile_matmul(x, panels_of(weight), 70, None)
    x[4, 3], weight[66, 7] = float("inf"), float("nan")
    y = tile_matmul(x, panels_of(weight), 70, None)
    assert not y[4].isfinite().any()
    assert y[:, 66].isnan().all()
    others = [row for row in range(40) if row != 4]
    assert torch.equal(y[others][:, :66], clean[others][:, :66])
    assert torch.equal(y[others][:, 67:], clean[others][:, 67:])


@needs_tiles
def test_columns_that_are_not_adjacent_are_read_too() -> None:
    panels, x = panels_of(random(30, 20, seed=1)), random(20, 4, seed=2).T
    assert torch.equal(
        tile_matmul(x, panels, 30, None), tile_matmul(x.contiguous(), panels, 30, None)
    )


@needs_tiles
def test_sizes_that_disagree_are_refused() -> None:
    panels, x = panels_of(random(30, 20, seed=1)), random(4, 20, seed=2)
    with pytest.raises(ValueError, match="too few for the outputs"):
        tile_matmul(x, panels, 65, None)
    with pytest.raises(ValueError, match="x_MI"):
        tile_matmul(random(4, 48, seed=2), panels, 30, None)
    with pytest.raises(ValueError, match="whole tiles"):
        tile_matmul(x, panels[:, :15].contiguous(), 30, None)


@needs_tiles
@torch.inference_mode()
def test_a_packed_weight_is_written_read_released_and_packed_again() -> None:
    linear = Linear(37, 70, bias=True, dtype=torch.bfloat16, device=CPU)
    x, bias = random(33, 37, seed=3), random(70, seed=4)
    assert linear.bias_O is not None
    for seed in (1, 2):
        weight = random(70, 37, seed=seed)
        linear.weight_rows(0, 70).write(weight)
        linear.bias_O.copy_(bias)
        linear.pack()
        assert isinstance(linear._packed, TiledWeight)
        assert linear.multiplies_few_rows
        address = linear.memory
        linear.weight_rows(3, 66).write(random(63, 37, seed=5).float())  # of another dtype
        weight[3:66] = random(63, 37, seed=5)
        assert linear.memory == address
        assert torch.equal(linear.weight_rows(0, 70).read(), weight)
        assert torch.equal(linear(x), reference.tile_matmul(x, panels_of(weight), 70, bias))
        assert make_row_invariant([linear], 200) == 1
        assert linear.release() >= 70 * 37 * 2
        linear.allocate()


def test_other_dtypes_and_devices_have_no_tiles() -> None:
    assert not native.supports(torch.float32, CPU)
    assert not native.supports(torch.float16, CPU)
    assert not native.supports(torch.bfloat16, torch.device("cuda"))
    assert TiledWeight.pack(torch.ones(8, 8)) is None


def test_the_reference_is_a_product() -> None:
    weight, x, bias = random(70, 1101, seed=1), random(9, 1101, seed=2), random(70, seed=3)
    y = reference.tile_matmul(x, panels_of(weight), 70, bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
