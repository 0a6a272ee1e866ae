from __future__ import annotations

import pytest
import torch

from rollout.ops import gpu
from rollout.ops.rms_norm import add_rms_norm, native, reference, rms_norm

EPS = 1e-5


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol = 4e-6 if actual.dtype is torch.float32 else 2 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("width", [1, 24, 100, 576])
def test_norms_are_the_reference(dtype, device, width: int) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(3, 2 * width).to(dtype)[:, :width] * 3, torch.randn(width).to(dtype)
    residual = torch.randn(3, width + 3).to(dtype)[:, :width]
    on_device = [tensor.to(device, copy=True) for tensor in (x, residual, weight)]
    assert native.supports(*on_device[::2]) or gpu.supports(*on_device[::2])
    assert_near(rms_norm(*on_device[::2], EPS), reference.rms_norm(x, weight, EPS))
    expected = reference.add_rms_norm(x, residual, weight, EPS)
    out = add_rms_norm(*on_device, EPS)
    assert out.is_contiguous()
    assert torch.equal(on_device[1].cpu(), residual)
    assert_near(out, expected)


def test_rms_norm_of_heads_inside_a_fused_row(dtype, device) -> None:
    torch.manual_seed(0)
    qkv, weight = torch.randn(3, 7 * 64).to(device, dtype), torch.randn(64).to(device, dtype)
    heads = qkv[:, 128 : 128 + 3 * 64].view(3, 3, 64)
    out = rms_norm(heads, weight, EPS)
    assert out.is_contiguous()
    assert torch.equal(out, rms_norm(heads.contiguous(), weight, EPS))
    assert_near(out, reference.rms_norm(heads.cpu(), weight.cpu(), EPS))
    assert torch.equal(rms_norm(heads.reshape(1, 3, 3, 64), weight, EPS)[0], out)
    assert torch.equal(rms_norm(heads[1, 1].contiguous(), weight, EPS), out[1, 1])


def test_rows_do_not_depend_on_each_other(dtype, device, rounds, set_threads) -> None:
    torch.manual_seed(2)
    count = rounds(300)
    x, weight = torch.randn(count, 576).to(device, dtype), torch.randn(576).to(device, dtype)
    order = torch.randperm(count).to(device)

    def added(rows: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(rows, rows.flip(1).contiguous(), weight, EPS)

    for op in (lambda rows: rms_norm(rows, weight, EPS), added):
        set_threads(2)
        together = op(x)
        set_threads(1)
        assert torch.equal(op(x[order]), together[order])
        for row in range(3):
            assert torch.equal(op(x[row : row + 1]), together[row : row + 1])
