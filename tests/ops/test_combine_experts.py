from __future__ import annotations

import pytest
import torch

from rollout.ops.combine_experts import combine_experts


def operands(dtype, rows, ranks, hidden):
    generator = torch.Generator().manual_seed(hidden)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    gates = random(rows, 3).to(dtype)[:, 1]
    return (
        random(rows, ranks, hidden).to(dtype),
        random(rows, ranks).softmax(1),
        random(rows, hidden).to(dtype),
        gates,
    )


@pytest.mark.parametrize(("rows", "ranks", "hidden"), [(1, 1, 1), (5, 3, 37), (33, 8, 96)])
def test_the_sum_of_all(dtype, rows, ranks, hidden) -> None:
    outputs, weights, shared, gate = operands(dtype, rows, ranks, hidden)
    exact = (outputs.double() * weights.double()[:, :, None]).sum(1)
    tolerance = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(
        combine_experts(outputs, weights).double(), exact, rtol=tolerance, atol=1e-6
    )
    exact += shared.double() * gate.double().sigmoid()[:, None]
    with_shared = combine_experts(outputs, weights, shared, gate)
    torch.testing.assert_close(with_shared.double(), exact, rtol=tolerance, atol=1e-6)
    assert with_shared.dtype is dtype
    assert with_shared.is_contiguous()


def test_rows_do_not_depend_on_each_other(dtype, set_threads) -> None:
    operands_of_all = operands(dtype, 67, 5, 203)
    set_threads(2)
    together = combine_experts(*operands_of_all)
    set_threads(1)
    for rows in (*torch.arange(67).split(1), torch.arange(66, -1, -1), torch.arange(3, 20)):
        assert torch.equal(combine_experts(*(x[rows] for x in operands_of_all)), together[rows])


def test_no_rows(dtype) -> None:
    assert combine_experts(*operands(dtype, 0, 2, 9)).shape == (0, 9)
