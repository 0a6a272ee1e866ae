"""Gated activations of MLPs, and the soft cap, which shares their tangent."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rollout.ops import glu
from rollout.ops.glu import reference
from rollout.ops.soft_cap import reference as soft_cap_reference
from rollout.ops.soft_cap import soft_cap_


def capped(op, x: torch.Tensor) -> torch.Tensor:
    x = x.clone(memory_format=torch.preserve_format)
    op(x, 5.0)
    return x


OPS = {
    "silu": (glu.silu_mul, reference.silu_mul),
    "gelu": (glu.gelu_mul, reference.gelu_mul),
    "clamped": (
        partial(glu.clamped_silu_mul, alpha=1.702, limit=2.5),
        partial(reference.clamped_silu_mul, alpha=1.702, limit=2.5),
    ),
    "cap": (partial(capped, soft_cap_), partial(capped, soft_cap_reference.soft_cap_)),
}


@pytest.fixture(params=OPS)
def ops(request):
    return OPS[request.param]


def test_ops_are_the_reference(dtype, device, ops) -> None:
    op, expected = ops
    torch.manual_seed(0)
    rtol = 4e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    for width in (1, 7, 16, 100, 1030):
        x = (torch.randn(3, 2 * width + 5) * torch.tensor([[0.02], [1.0], [8.0]])).to(dtype)
        x = x[:, : 2 * width]
        torch.testing.assert_close(op(x.to(device)).cpu(), expected(x), rtol=rtol, atol=2e-6)


def test_extremes(device, ops) -> None:
    op, expected = ops
    small = [0.0, -0.0, 1e-20, 0.625, -0.624]
    large = [88.0, -88.0, 89.0, -89.0, 1e4, -1e4, torch.inf, torch.nan]
    x = torch.tensor([*small, *large, *[1.0] * 13]).unsqueeze(0)
    atol = 1e-30 if op is glu.silu_mul else 2e-6
    torch.testing.assert_close(
        op(x.to(device)).cpu(), expected(x), rtol=4e-6, atol=atol, equal_nan=True
    )


def test_rows_do_not_depend_on_each_other(dtype, device, rounds, set_threads, ops) -> None:
    op, _ = ops
    torch.manual_seed(0)
    x = torch.randn(rounds(50), 2 * 701).to(device, dtype)
    set_threads(2)
    together = op(x)
    set_threads(1)
    assert torch.equal(together, torch.cat([op(row.unsqueeze(0)) for row in x]))
    assert len(op(x[:0])) == 0
