from __future__ import annotations

import pytest
import torch

from rollout.ops.head_matmul import head_matmul, native, reference


def operands(rows: int, heads: int, inputs: int, outputs: int, dtype: torch.dtype):
    """Rows of x and of the output are parts of wider ones; the output is NaN."""
    random = torch.Generator().manual_seed(rows + inputs)
    x_THI = torch.randn(rows, heads, inputs + 3, generator=random).to(dtype)[..., 2:-1]
    weights_HIO = torch.randn(heads, inputs, outputs, generator=random).to(dtype)
    out_THO = torch.full((rows, heads, outputs + 5), torch.nan, dtype=dtype)[..., 4:-1]
    return x_THI, weights_HIO, out_THO


@pytest.mark.parametrize("rows", [1, 5, 49, 100])
def test_head_matmul_is_the_reference(dtype, rows) -> None:
    for sizes in ((1, 1, 1), (3, 10, 20), (6, 7, 33), (4, 96, 64), (5, 64, 130)):
        x, weights, out = operands(rows, *sizes, dtype)
        assert native.supports(x, weights, out)
        whole = out._base
        assert head_matmul(x, weights, out) is out
        rtol = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(out, reference.head_matmul(x, weights), rtol=rtol, atol=2e-5)
        assert whole.isnan().sum() == rows * sizes[0] * 5, "nothing beside it is written"
        assert torch.equal(head_matmul(x, weights), out)


@pytest.mark.parametrize("outputs", [64, 37])
def test_rows_do_not_depend_on_each_other(dtype, rounds, set_threads, outputs) -> None:
    x, weights, out = operands(rounds(103), 4, 40, outputs, dtype)
    set_threads(2)
    together = head_matmul(x, weights, out)
    set_threads(1)
    one_by_one = torch.cat([head_matmul(row.unsqueeze(0), weights) for row in x])
    assert torch.equal(together, one_by_one)
    assert torch.equal(head_matmul(x[30:], weights), together[30:])
    assert head_matmul(x[:0], weights).shape == (0, 4, outputs)
