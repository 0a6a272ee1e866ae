from collections.abc import Iterator

import pytest
import torch

from rollout.errors import ExactnessError
from rollout.models.layers.linear import Linear
from rollout.models.layers.row_invariance import (
    LARGEST_PADDING,
    check_outputs,
    make_row_invariant,
)
from rollout.ops import matmul
from tests.helpers.packing import needs_no_tiles

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def random_linear(inputs, outputs, dtype=torch.float32, packing=True, bias=False):
    generator = torch.Generator().manual_seed(3)
    linear = Linear(inputs, outputs, bias=bias, dtype=dtype, device=CPU, packing=packing)
    linear.weight_rows(0, outputs).write(torch.randn(outputs, inputs, generator=generator))
    if linear.bias_O is not None:
        linear.bias_O.copy_(torch.randn(outputs, generator=generator))
    linear.pack()
    return linear


@pytest.mark.parametrize(
    ("dtype", "packing"),
    [
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.bfloat16, False, marks=needs_no_tiles),
    ],
)
@torch.inference_mode()
def test_rows_do_not_change_from_the_minimum_on(dtype, packing):
    """Every row count, place and thread count, with the model's own weights this time."""
    linears = [
        random_linear(*shape, dtype, packing, bias=shape[0] == 48)
        for shape in [(48, 80), (37, 49), (192, 64), (576, 960)]
    ]
    most = 130
    least = make_row_invariant(linears, most)
    assert 1 <= least <= LARGEST_PADDING
    for linear in linears:
        x = torch.randn(most, linear.in_features).to(dtype)
        whole = linear(x)
        for count in range(least, most):
            torch.set_num_threads(1 + count % 2)
            assert torch.equal(linear(x[-count:].clone()), whole[-count:]), count
            assert torch.equal(linear(x[:count]), whole[:count]), count


def summed_backwards_where(differs):
    """A product that adds its terms in the other order where ``differs(rows, threads)``."""

    def call(self: Linear, x):
        features = range(x.shape[1])
        if differs(x.shape[0], torch.get_num_threads()):
            features = reversed(features)
        weight, x_f32 = self.weight_rows(0, self.out_features).read().float(), x.float()
        y = torch.zeros(x.shape[0], weight.shape[0])
        for feature in features:
            y.addcmul_(x_f32[:, feature, None], weight[:, feature])
        return y.to(x.dtype)

    return call


@pytest.mark.parametrize(
    ("least", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (7, torch.float32)]
)
def test_padding_is_the_least_that_holds(least, dtype, monkeypatch):
    linear = random_linear(64, 96, dtype)
    otherwise = summed_backwards_where(lambda rows, threads: rows < least)
    monkeypatch.setattr(Linear, "__call__", otherwise)
    assert make_row_invariant([linear], 64) == (least if linear.is_packed else LARGEST_PADDING)


@pytest.mark.parametrize(
    "differs",
    [lambda rows, threads: rows == 33, lambda rows, threads: threads == 1],
    ids=["33 rows", "one thread"],
)
def test_a_product_that_no_padding_mends_is_named(differs, monkeypatch):
    linear = random_linear(96, 160)
    monkeypatch.setattr(Linear, "__call__", summed_backwards_where(differs))
    with pytest.raises(ExactnessError, match=r"96 -> 160.*exact=false"):
        make_row_invariant([linear], 64)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_whose_width_changes_its_bits_is_named(dtype, monkeypatch, caplog):
    linears = [
        random_linear(96, outputs, dtype, bias=bias)
        for outputs in (7, 33, 160, 700) for bias in (False, True)
    ]  # fmt: skip
    if linears[0].is_packed:
        check_outputs(linears)
        assert not caplog.text
    forwards, backwards = (summed_backwards_where(lambda *_, b=b: b) for b in (False, True))

    def call(self: Linear, x):
        return (backwards if self.out_features == 33 else forwards)(self, x)

    monkeypatch.setattr(Linear, "__call__", call)
    check_outputs(linears)
    assert len(caplog.records) == 2, "with biases and without"
    assert all("96 -> 33 product" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("bias", [True, False])
def test_a_row_invariant_linear_has_the_product_of_the_op(bias):
    linear = random_linear(48, 80, torch.bfloat16, packing=False, bias=bias)
    x = torch.randn(5, 48).bfloat16()
    fast = linear(x)
    linear.row_invariant = True
    weight = linear.weight_rows(0, 80).read()
    assert torch.equal(linear(x), matmul.reference.matmul(x, weight, linear.bias_O))
    torch.testing.assert_close(linear(x), fast)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_one_row_is_enough(dtype):
    device = torch.device("cuda")
    linears = [Linear(*shape, dtype=dtype, device=device) for shape in [(4096, 6144), (37, 49)]]
    assert make_row_invariant(linears, 600) == 1
    assert all(linear.row_invariant for linear in linears)
