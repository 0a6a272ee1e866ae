from __future__ import annotations

import pytest
import torch

from rollout.ops import gpu
from rollout.ops.silu_mul import native, reference, silu_mul


@pytest.mark.parametrize("width", [1, 7, 16, 100, 1023, 1030])
def test_silu_mul_is_the_reference(dtype, device, width: int) -> None:
    torch.manual_seed(width)
    gate_up = (torch.randn(3, 2 * width + 5) * 8).to(dtype)[:, : 2 * width]
    on_device = gate_up.to(device)
    assert native.supports(on_device) or gpu.supports(on_device)
    rtol = 4e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    expected = reference.silu_mul(gate_up)
    torch.testing.assert_close(silu_mul(on_device).cpu(), expected, rtol=rtol, atol=2e-6)


def test_extreme_gates(device) -> None:
    gates = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.0, -88.0, 89.0, -89.0, torch.inf, torch.nan])
    gate_up = torch.cat((gates, torch.ones(10))).unsqueeze(0)
    out, expected = silu_mul(gate_up.to(device)).cpu(), reference.silu_mul(gate_up)
    torch.testing.assert_close(out, expected, rtol=4e-6, atol=1e-30, equal_nan=True)


def test_rows_do_not_depend_on_each_other(dtype, device, rounds, set_threads) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(rounds(100), 2 * 1536).to(device, dtype)
    set_threads(2)
    together = silu_mul(gate_up)
    set_threads(1)
    one_by_one = torch.cat([silu_mul(row.unsqueeze(0)) for row in gate_up])
    assert torch.equal(together, one_by_one)
    assert silu_mul(gate_up[:0]).shape == (0, 1536)
