"""Norms, gate, rotary and the KV scatter: against their references, and row by row."""

from __future__ import annotations

import pytest
import torch

from rollout.ops.rms_norm import reference as rms_norm_reference
from rollout.ops.rms_norm import triton as rms_norm_triton
from rollout.ops.rotary import reference as rotary_reference
from rollout.ops.rotary import triton as rotary_triton
from rollout.ops.silu_mul import reference as silu_mul_reference
from rollout.ops.silu_mul import triton as silu_mul_triton
from rollout.ops.store_kv import reference as store_kv_reference
from rollout.ops.store_kv import triton as store_kv_triton

EPS = 1e-5


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    rtol = 4e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=rtol, atol=2e-6)


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(device, dtype)


@pytest.mark.parametrize("width", [1, 24, 100, 576])
def test_rms_norm_is_the_reference(dtype, device, width: int) -> None:
    torch.manual_seed(width)
    x, weight = (normal(*s, dtype=dtype, device=device) for s in ((3, 2 * width), (width,)))
    x = x[:, :width] * 3  # rows lie apart
    expected = rms_norm_reference.rms_norm(x.cpu(), weight.cpu(), EPS)
    assert_near(rms_norm_triton.rms_norm(x, weight, EPS), expected, dtype)


def test_rms_norm_of_heads_inside_a_fused_row(dtype, device) -> None:
    torch.manual_seed(0)
    qkv = normal(3, 7 * 64, dtype=dtype, device=device)
    weight = normal(64, dtype=dtype, device=device)
    heads = qkv[:, 128 : 128 + 3 * 64].view(3, 3, 64)
    out = rms_norm_triton.rms_norm(heads, weight, EPS)
    assert out.is_contiguous()
    assert torch.equal(out, rms_norm_triton.rms_norm(heads.contiguous(), weight, EPS))
    assert_near(out, rms_norm_reference.rms_norm(heads.cpu(), weight.cpu(), EPS), dtype)
    four = heads.reshape(1, 3, 3, 64)
    assert torch.equal(rms_norm_triton.rms_norm(four, weight, EPS)[0], out)


@pytest.mark.parametrize("width", [24, 576])
def test_add_rms_norm_is_the_reference(dtype, device, width: int) -> None:
    torch.manual_seed(1)
    weight = normal(width, dtype=dtype, device=device)
    x = normal(5, 2 * width, dtype=dtype, device=device)[:, :width]
    residual = normal(5, width + 3, dtype=dtype, device=device)[:, :width]
    expected_residual = residual.cpu().clone()
    expected = rms_norm_reference.add_rms_norm(x.cpu(), expected_residual, weight.cpu(), EPS)
    out = rms_norm_triton.add_rms_norm(x, residual, weight, EPS)
    assert out.is_contiguous()
    assert torch.equal(residual.cpu(), expected_residual)
    assert_near(out, expected, dtype)


@pytest.mark.parametrize("width", [1, 1023, 1030])
def test_silu_mul_is_the_reference(dtype, device, width: int) -> None:
    torch.manual_seed(width)
    gate_up = normal(3, 2 * width + 5, dtype=dtype, device=device)[:, : 2 * width] * 4
    out = silu_mul_triton.silu_mul(gate_up)
    assert_near(out, silu_mul_reference.silu_mul(gate_up.cpu()), dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    [(4, 2, 24, 16), (9, 3, 64, 64), (5, 1, 80, 20), (3, 3, 128, 128)],
)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_rotary_is_the_reference(
    dtype, device, heads, kv_heads, head_dim, rotated, position_dtype
) -> None:
    torch.manual_seed(head_dim)
    qkv = normal(4, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    positions = torch.randint(50, (4,), dtype=position_dtype)
    angles = torch.rand(50, rotated // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    expected = qkv.cpu().clone()
    expected_q, expected_k = expected[:, :heads], expected[:, heads : heads + kv_heads]
    rotary_reference.rotary_(expected_q, expected_k, positions, cos_sin)
    rotary_triton.rotary_(q, k, positions.to(device), cos_sin.to(device))
    assert_near(qkv, expected, dtype)
    assert torch.equal(qkv[..., rotated:].cpu(), expected[..., rotated:])
    assert torch.equal(qkv[:, heads + kv_heads :].cpu(), expected[:, heads + kv_heads :])


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_outside_the_table_makes_its_row_nan(device, position: int) -> None:
    q, k = torch.ones(2, 2, 8, device=device), torch.ones(2, 1, 8, device=device)
    positions = torch.tensor([0, position], device=device)
    rotary_triton.rotary_(q, k, positions, torch.ones(5, 8, device=device))
    assert q[0].isfinite().all()
    assert q[1].isnan().all()
    assert k[1].isnan().all()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_store_kv_is_the_reference(dtype, device, slot_dtype) -> None:
    torch.manual_seed(0)
    qkv = normal(5, 9, 24, dtype=dtype, device=device)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    pools = torch.full((20, 2, 3, 24), torch.nan, dtype=dtype, device=device)
    expected = pools.cpu().clone()
    slots = torch.randperm(20)[:5].to(slot_dtype)
    store_kv_reference.store_kv(k.cpu(), v.cpu(), expected[:, 0], expected[:, 1], slots)
    store_kv_triton.store_kv(k, v, pools[:, 0], pools[:, 1], slots.to(device))
    torch.testing.assert_close(pools.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_pool_is_not_written(device, slot: int) -> None:
    rows = torch.ones(2, 1, 8, device=device)
    memory = torch.zeros(12, 1, 8, device=device)
    pool = memory[4:8]
    store_kv_triton.store_kv(rows, rows, pool, pool, torch.tensor([slot, 2], device=device))
    assert memory.sum(dim=(1, 2)).tolist() == [0] * 6 + [8] + [0] * 5


def test_rows_do_not_depend_on_each_other(dtype, device) -> None:
    torch.manual_seed(2)
    x, weight = (normal(*s, dtype=dtype, device=device) for s in ((7, 576), (576,)))
    order = torch.randperm(7)[:4].to(device)
    ops = (
        lambda x: rms_norm_triton.rms_norm(x, weight, EPS),
        lambda x: rms_norm_triton.add_rms_norm(x, x.flip(1).contiguous(), weight, EPS),
        silu_mul_triton.silu_mul,
    )
    for op in ops:
        together = op(x)
        assert torch.equal(op(x[order]), together[order])
        for row in range(2):
            assert torch.equal(op(x[row : row + 1]), together[row : row + 1])


def test_no_rows(device) -> None:
    empty, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    assert rms_norm_triton.rms_norm(empty, weight, EPS).shape == (0, 8)
    assert rms_norm_triton.add_rms_norm(empty, empty, weight, EPS).shape == (0, 8)
    assert silu_mul_triton.silu_mul(empty).shape == (0, 4)
    heads, none = empty.view(0, 1, 8), torch.empty(0, dtype=torch.int64, device=device)
    rotary_triton.rotary_(heads, heads, none, torch.ones(5, 8, device=device))
    store_kv_triton.store_kv(heads, heads, heads, heads, none)
