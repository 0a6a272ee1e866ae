import pytest
import torch
from torch.nn.functional import linear as reference

from rollout.models.layers.linear import Linear
from tests.helpers.packing import packs

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(inputs, outputs, *, bias=False, dtype=torch.float32, packing=True, seed=0):
    """A Linear with random weights, and those weights."""
    linear = Linear(inputs, outputs, bias=bias, dtype=dtype, device=CPU, packing=packing)
    weight = random(outputs, inputs, seed=seed, dtype=dtype)
    linear.weight_rows(0, outputs).write(weight)
    values = random(outputs, seed=seed + 1, dtype=dtype) if bias else None
    if values is not None:
        linear.bias_rows(0, outputs).write(values)
    linear.pack()
    return linear, weight, values


@pytest.mark.parametrize(("packing", "bias"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (37, 49), (200, 333)])
def test_product(inputs, outputs, dtype, bias, packing):
    linear, weight, values = filled(inputs, outputs, bias=bias, dtype=dtype, packing=packing)
    assert linear.is_packed == (packing and packs(dtype))
    for rows in (0, 1, 2, 7, 64):
        x = random(rows, inputs, seed=9, dtype=dtype)
        with torch.inference_mode():
            y = linear(x)
        exact = reference(x.double(), weight.double(), None if values is None else values.double())
        assert y.shape == (rows, outputs)
        assert y.dtype == dtype
        scale = exact.abs().max() if rows else 1.0
        assert ((y - exact).abs() <= TOLERANCE[dtype] * scale).all()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_fused_weight_is_rewritten_alone(dtype, packing):
    linear, weight, values = filled(24, 60, bias=True, dtype=dtype, packing=packing)
    part = random(20, 24, seed=5)  # float32: converted on the way
    with torch.no_grad():
        linear.weight_rows(30, 50).write(part)
        linear.bias_rows(30, 50).write(torch.zeros(20))
    weight[30:50] = part.to(dtype)
    values[30:50] = 0
    x = random(4, 24, seed=6, dtype=dtype)
    torch.testing.assert_close(linear(x), reference(x, weight, values))
    linear.pack()
    assert linear.is_packed == (packing and packs(dtype))
    torch.testing.assert_close(linear(x), reference(x, weight, values))
    assert torch.equal(linear.weight_rows(0, 60).read(), weight)
    assert torch.equal(linear.weight_rows(30, 50).read(), part.to(dtype))
    assert linear.is_packed == (packing and packs(dtype)), "reading keeps it packed"
    copies = [each for each in vars(linear).values() if isinstance(each, torch.Tensor)]
    assert not linear.is_packed or [each.dim() for each in copies] == [1], "the bias alone"
    assert torch.equal(linear.bias_rows(0, 60).read(), values)


def test_a_tied_weight_follows_its_table_and_leaves_it_in_place():
    table = random(30, 12)
    linear = Linear(12, 30, dtype=torch.float32, device=CPU, table_OI=table)
    linear.pack()
    assert linear.is_packed
    before = table.data_ptr()
    update = random(30, 12, seed=3)
    linear.weight_rows(0, 30).write(update)
    assert torch.equal(table, update)
    assert table.data_ptr() == before
    x = random(5, 12, seed=4)
    torch.testing.assert_close(linear(x), reference(x, update))
    linear.pack()
    torch.testing.assert_close(linear(x), reference(x, update))
