"""Gates of recurrent and attention layers, against their references."""

from __future__ import annotations

import pytest
import torch

from rollout.ops.gates import delta_gates, gated_rms_norm, reference, sigmoid_gate_
from rollout.ops.rms_norm import add_rms_norm, rms_norm
from rollout.ops.rms_norm import reference as rms_norm_reference

EPS = 1e-6


def assert_near(actual: torch.Tensor, expected: torch.Tensor, atol: float = 4e-6) -> None:
    rtol = 1e-5 if actual.dtype is torch.float32 else 2 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("heads", "parameter_dtype"), [(1, torch.float32), (19, torch.float16), (48, torch.float32)]
)
def test_delta_gates_are_the_reference(dtype, device, heads: int, parameter_dtype) -> None:
    """a and b inside one projection, with extremes; each row as it is alone."""
    torch.manual_seed(heads)
    ba = (torch.randn(7, 2 * heads + 1) * 4).to(dtype)
    ba[0, :2], ba[1, :2] = 60000, -60000
    parameters = (torch.rand(heads).mul(16).log(), torch.randn(heads))
    parameters = [each.to(parameter_dtype) for each in parameters]
    expected = reference.delta_gates(ba[:, heads : 2 * heads], ba[:, :heads], *parameters)
    ba, *parameters = (each.to(device) for each in (ba, *parameters))
    a, b = ba[:, heads : 2 * heads], ba[:, :heads]
    found = delta_gates(a, b, *parameters)
    for out, wanted in zip(found, expected, strict=True):
        assert out.dtype is torch.float32
        assert out.is_contiguous()
        torch.testing.assert_close(out.cpu(), wanted, rtol=2e-6, atol=1e-30)
    for row in range(7):
        alone = delta_gates(a[row : row + 1], b[row : row + 1], *parameters)
        assert all(torch.equal(x, y[row : row + 1]) for x, y in zip(alone, found, strict=True))


def test_gated_rms_norm_is_the_reference(dtype, device) -> None:
    torch.manual_seed(0)
    for dim in (1, 24, 128):
        x, weight = torch.randn(5, 3, dim).to(dtype) * 3, torch.randn(dim).to(dtype)
        wide = torch.randn(5, 3 * dim + 7).to(dtype) * 3
        expected = reference.gated_rms_norm(x, wide[:, 7:].unflatten(1, (3, dim)), weight, EPS)
        gate = wide.to(device)[:, 7:].unflatten(1, (3, dim))
        out = gated_rms_norm(x.to(device), gate, weight.to(device), EPS)
        assert out.is_contiguous()
        assert_near(out, expected)


def test_a_row_of_gated_rms_norm_does_not_depend_on_the_others(
    dtype, device, rounds, set_threads
) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(2, rounds(40), 4, 128).to(device, dtype)
    weight = torch.randn(128).to(device, dtype)
    set_threads(2)
    together = gated_rms_norm(x, gate, weight, EPS)
    set_threads(1)
    for row in range(len(x)):
        alone = gated_rms_norm(x[row : row + 1], gate[row : row + 1], weight, EPS)
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("width", [24, 576])
def test_an_offset_of_one_is_the_reference(dtype, device, width: int) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(2, 3, width).to(dtype) * 3
    weight = torch.randn(width).to(dtype)
    on_device = [tensor.to(device, copy=True) for tensor in (x, residual, weight)]
    out = rms_norm(on_device[0], on_device[2], EPS, unit_offset=True)
    assert_near(out, rms_norm_reference.rms_norm(x, weight, EPS, unit_offset=True))
    for row in range(3):
        alone = rms_norm(on_device[0][row : row + 1], on_device[2], EPS, unit_offset=True)
        assert torch.equal(alone, out[row : row + 1])
    expected = rms_norm_reference.add_rms_norm(x, residual, weight, EPS, unit_offset=True)
    assert_near(add_rms_norm(*on_device, EPS, unit_offset=True), expected)
    assert torch.equal(on_device[1].cpu(), residual)


@pytest.mark.parametrize("dim", [1, 128])
def test_sigmoid_gate_is_the_reference(dtype, device, dim: int) -> None:
    """Gates of heads and of flat rows are alike, and each row is as it is alone."""
    torch.manual_seed(dim)
    wide = (torch.randn(5, 3, 2 * dim) * 5).to(dtype)
    extremes = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.0, -88.0, torch.inf, -torch.inf])
    if dim > 8:
        wide[4, 2, dim : dim + 8] = extremes.to(dtype)
    expected = torch.randn(5, 3, dim).to(dtype)
    x, by_row = expected.to(device, copy=True), expected.to(device, copy=True)
    flat = expected.view(5, 3 * dim).to(device, copy=True)
    reference.sigmoid_gate_(expected, wide[..., dim:])
    gate = wide.to(device)[..., dim:]
    sigmoid_gate_(x, gate)
    sigmoid_gate_(flat, gate.flatten(1).contiguous())
    assert_near(x, expected, 1e-30 if dtype is not torch.float32 else 4e-6)
    assert torch.equal(flat.view(5, 3, dim), x)
    for row in range(5):
        sigmoid_gate_(by_row[row : row + 1], gate[row : row + 1])
    assert torch.equal(by_row, x)
