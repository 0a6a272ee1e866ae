"""Gates of recurrent and attention layers, against transformers and their references."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from rollout.ops.delta_gates import delta_gates
from rollout.ops.delta_gates import reference as delta_gates_reference
from rollout.ops.gated_rms_norm import gated_rms_norm
from rollout.ops.gated_rms_norm import reference as gated_rms_norm_reference
from rollout.ops.rms_norm import add_rms_norm, rms_norm
from rollout.ops.rms_norm import reference as rms_norm_reference
from rollout.ops.sigmoid_gate import reference as sigmoid_gate_reference
from rollout.ops.sigmoid_gate import sigmoid_gate_

EPS = 1e-6


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps


def gate_inputs(rows: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """a and b inside one projection, with extremes."""
    torch.manual_seed(heads)
    ba = (torch.randn(rows, 2 * heads + 1) * 4).to(dtype)
    ba[0, :2], ba[1, :2] = 60000, -60000
    b, a = ba[:, :heads], ba[:, heads : 2 * heads]
    return a, b, torch.rand(heads).mul(16).log(), torch.randn(heads)


@pytest.mark.parametrize("heads", [1, 4, 19, 48])
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16])
def test_delta_gates_are_the_reference(dtype, heads: int, parameter_dtype: torch.dtype) -> None:
    a, b, A_log, dt_bias = gate_inputs(7, heads, dtype)
    arguments = (a, b, A_log.to(parameter_dtype), dt_bias.to(parameter_dtype))
    for out, expected in zip(
        delta_gates(*arguments), delta_gates_reference.delta_gates(*arguments), strict=True
    ):
        assert out.dtype is torch.float32
        assert out.is_contiguous()
        torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-30)


def test_a_row_of_delta_gates_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    a, b, *parameters = gate_inputs(40, 19, dtype)
    together = delta_gates(a, b, *parameters)
    for row in range(40):
        alone = delta_gates(a[row : row + 1], b[row : row + 1], *parameters)
        assert all(torch.equal(x, y[row : row + 1]) for x, y in zip(alone, together, strict=True))


@pytest.mark.parametrize("dim", [1, 16, 24, 100, 128])
def test_gated_rms_norm_is_that_of_transformers(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    x = torch.randn(5, 3, dim).to(dtype) * 3
    gate = torch.randn(5, 3 * dim + 7).to(dtype)[:, 7:].unflatten(1, (3, dim)) * 3
    norm = theirs.Qwen3NextRMSNormGated(dim, eps=EPS).to(dtype)
    weight = norm.weight.data.copy_(torch.randn(dim))
    out = gated_rms_norm(x, gate, weight, EPS)
    assert out.is_contiguous()
    for expected in (
        norm(x, gate).detach(),
        gated_rms_norm_reference.gated_rms_norm(x, gate, weight, EPS),
    ):
        torch.testing.assert_close(out, expected, rtol=tolerance(dtype), atol=1e-6)


def test_a_row_of_gated_rms_norm_does_not_depend_on_the_others(dtype, set_threads) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(2, 40, 4, 128).to(dtype)
    weight = torch.randn(128).to(dtype)
    set_threads(2)
    together = gated_rms_norm(x, gate, weight, EPS)
    set_threads(1)
    for row in range(40):
        alone = gated_rms_norm(x[row : row + 1], gate[row : row + 1], weight, EPS)
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("width", [1, 24, 100, 576])
def test_an_offset_of_one_is_that_of_transformers(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(2, 6, width).to(dtype) * 3
    norm = theirs.Qwen3NextRMSNorm(width, eps=EPS).to(dtype)
    weight = norm.weight.data.copy_(torch.randn(width))
    out = rms_norm(x, weight, EPS, unit_offset=True)
    torch.testing.assert_close(out, norm(x).detach(), rtol=tolerance(dtype), atol=1e-6)
    expected_residual = residual.clone()
    expected = rms_norm_reference.add_rms_norm(x, expected_residual, weight, EPS, unit_offset=True)
    out = add_rms_norm(x, residual, weight, EPS, unit_offset=True)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(out, expected, rtol=tolerance(dtype), atol=1e-6)
    together = rms_norm(x, weight, EPS, unit_offset=True)
    for row in range(6):
        assert torch.equal(rms_norm(x[row : row + 1], weight, EPS, True), together[row : row + 1])


@pytest.mark.parametrize("dim", [1, 24, 100])
def test_sigmoid_gate_is_the_reference(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    query_gate = (torch.randn(5, 3, 2 * dim) * 5).to(dtype)
    x, gate = torch.randn(5, 3, dim).to(dtype), query_gate[..., dim:]
    expected = x.clone()
    sigmoid_gate_reference.sigmoid_gate_(expected, gate)
    by_row = x.clone()
    flat = x.view(5, 3 * dim).clone()
    sigmoid_gate_(x, gate)
    sigmoid_gate_(flat, gate.reshape(5, 3 * dim))
    torch.testing.assert_close(x, expected, rtol=tolerance(dtype), atol=1e-30)
    assert torch.equal(flat.view(5, 3, dim), x)
    for row in range(5):
        sigmoid_gate_(by_row[row : row + 1], gate[row : row + 1])
    assert torch.equal(by_row, x)


def test_extreme_gates_of_attention() -> None:
    gate = torch.tensor([[0.0, -0.0, 1e4, -1e4, 88.0, -88.0, torch.inf, -torch.inf]])
    x = torch.ones_like(gate)
    sigmoid_gate_(x, gate)
    torch.testing.assert_close(x, gate.sigmoid(), rtol=1e-6, atol=1e-30)
