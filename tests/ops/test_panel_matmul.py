"""Products of few rows with packed weights: the op, its reference, and oneDNN's product."""

from __future__ import annotations

import pytest
import torch

from rollout.models.layers.linear import FEW_ROWS, Linear
from rollout.models.layers.packed_weight import PackedWeight
from rollout.models.layers.row_invariance import make_row_invariant
from rollout.ops.panel_matmul import native, reference
from rollout.ops.panel_matmul.native import panel_matmul
from rollout.ops.panels import write_panels
from tests.helpers.packing import needs_no_tiles

needs_the_op = pytest.mark.skipif(
    not native.supports(torch.empty(1, 2).bfloat16(), torch.empty(1, 1, 128).bfloat16()),
    reason="needs AVX-512's bfloat16 products",
)
CPU = torch.device("cpu")
SIZES = [(2, 1), (6, 5), (32, 64), (66, 65), (130, 96), (320, 200), (1100, 130)]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def panels_of(weight_OI: torch.Tensor) -> torch.Tensor:
    """Panels with units to spare, which hold garbage, as do the lanes of no output."""
    outputs, inputs = weight_OI.shape
    panels = torch.full((-(-outputs // 64), inputs // 2 + 3, 128), float("nan")).bfloat16()
    write_panels(panels, 0, weight_OI)
    return panels


@needs_the_op
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_the_op_is_the_reference(inputs: int, outputs: int, threads: int, set_threads) -> None:
    set_threads(threads)
    weight, bias = random(outputs, inputs, seed=1), random(outputs, seed=2)
    panels = panels_of(weight)
    for rows in (0, 1, 5, 6, 7, 12, 13, 16, 31):
        padded = random(rows, inputs + 3, seed=rows)
        x = padded[:, 1 : 1 + inputs]  # at odd addresses, of odd strides
        for block in (2, 64, 1024):
            for some in (None, bias):
                y = panel_matmul(x, panels, outputs, some, block)
                expected = reference.panel_matmul(x, panels, outputs, some, block)
                torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
                alone = [panel_matmul(row[None], panels, outputs, some, block) for row in x]
                assert torch.equal(y, torch.cat([y[:0], *alone])), "a row is its own"


@needs_the_op
def test_what_is_not_finite_stays_in_its_row_and_output() -> None:
    weight, x = random(70, 32, seed=1), random(9, 32, seed=2)
    clean = panel_matmul(x, panels_of(weight), 70, None, 1024)
    x[4, 3], weight[66, 7] = float("inf"), float("nan")
    y = panel_matmul(x, panels_of(weight), 70, None, 1024)
    assert not y[4].isfinite().any()
    assert y[:, 66].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(y[others][:, :66], clean[others][:, :66])
    assert torch.equal(y[others][:, 67:], clean[others][:, 67:])


@needs_the_op
def test_columns_that_are_not_adjacent_are_read_too() -> None:
    panels, x = panels_of(random(30, 20, seed=1)), random(20, 4, seed=2).T
    assert torch.equal(
        panel_matmul(x, panels, 30, None, 64), panel_matmul(x.contiguous(), panels, 30, None, 64)
    )


@needs_the_op
def test_sizes_that_disagree_are_refused() -> None:
    panels, x = panels_of(random(30, 20, seed=1)), random(4, 20, seed=2)
    with pytest.raises(ValueError, match="too few for the outputs"):
        panel_matmul(x, panels, 65, None, 64)
    with pytest.raises(ValueError, match="x_MI"):
        panel_matmul(random(4, 48, seed=2), panels, 30, None, 64)
    for block in (0, -2, 3):
        with pytest.raises(ValueError, match="sum_block"):
            panel_matmul(x, panels, 30, None, block)


@needs_the_op
@needs_no_tiles
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(48, 80), (576, 960), (1024, 70), (1536, 576), (3072, 192)]
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
    for threads in (1, 2):
        set_threads(threads)
        for rows in range(1, FEW_ROWS + 1):
            y = linear(x[:rows])
            assert torch.equal(y.view(torch.int16), whole[:rows].view(torch.int16)), rows


@needs_the_op
@needs_no_tiles
@torch.inference_mode()
def test_a_library_that_adds_otherwise_multiplies_few_rows_too(monkeypatch) -> None:
    """The order of the sums decides, not the processor."""
    linear = Linear(600, 70, dtype=torch.bfloat16, device=CPU)
    linear.weight_rows(0, 70).write(random(70, 600, seed=1))
    linear.pack()
    monkeypatch.setattr("rollout.models.layers.row_invariance._SUM_BLOCKS", (2, 4))
    make_row_invariant([linear], 64)
    assert linear.sum_block == 0
    x = random(1, 600, seed=2)
    monkeypatch.setattr("rollout.models.layers.linear.native", None)
    assert linear(x).shape == (1, 70)


@needs_the_op
@needs_no_tiles
@torch.inference_mode()
def test_few_rows_see_weights_that_were_written_and_woken() -> None:
    linear = Linear(1536, 70, dtype=torch.bfloat16, device=CPU)
    for seed in (1, 2):
        weight = random(70, 1536, seed=seed)
        linear.weight_rows(0, 70).write(weight)
        linear.pack()
        make_row_invariant([linear], 64)
        block, x = linear.sum_block, random(FEW_ROWS + 9, 1536, seed=3)
        assert torch.equal(linear(x[:3]), linear(x)[:3])
        linear.release()
        linear.allocate()
        linear.weight_rows(0, 70).write(weight)
        linear.pack()
        assert linear.sum_block == block
        assert torch.equal(linear(x[:3]), linear(x)[:3])


def test_other_weights_are_left_to_onednn() -> None:
    for inputs, dtype in ((37, torch.bfloat16), (64, torch.float32)):
        packed = PackedWeight.pack(torch.ones(8, inputs, dtype=dtype))
        assert packed is not None
        assert not packed.multiplies_few_rows


def test_the_reference_is_a_product() -> None:
    weight, x, bias = random(70, 1100, seed=1), random(9, 1100, seed=2), random(70, seed=3)
    for block in (2, 512, 2048):
        y = reference.panel_matmul(x, panels_of(weight), 70, bias, block)
        expected = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
