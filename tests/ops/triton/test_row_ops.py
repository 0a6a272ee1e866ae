"""Norms, gate, and rotary with the KV scatter: against their references, and row by row."""

from __future__ import annotations

import pytest
import torch

from rollout.ops.rms_norm import reference as rms_norm_reference
from rollout.ops.rms_norm import triton as rms_norm_triton
from rollout.ops.rotary_store_kv import reference as rotary_store_kv_reference
from rollout.ops.rotary_store_kv import triton as rotary_store_kv_triton
from rollout.ops.silu_mul import reference as silu_mul_reference
from rollout.ops.silu_mul import triton as silu_mul_triton

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


def table(rotated: int) -> torch.Tensor:
    angles = torch.rand(50, rotated // 2) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    [(4, 2, 24, 16), (9, 3, 64, 64), (5, 1, 80, 20), (9, 11, 128, 128), (3, 2, 24, 0)],
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rotary_store_kv_is_the_reference(
    dtype, device, heads, kv_heads, head_dim, rotated, index_dtype
) -> None:
    torch.manual_seed(head_dim)
    parts = [heads, kv_heads, kv_heads]
    qkv = normal(4, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    pools = torch.full((9, 2, kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    expected, expected_pools = qkv.cpu().clone(), pools.cpu().clone()
    positions, slots = (torch.randint(50, (4,)), torch.randperm(9)[:4])
    positions, slots, cos_sin = positions.to(index_dtype), slots.to(index_dtype), table(rotated)
    rotary_store_kv_reference.rotary_store_kv_(
        *expected.split(parts, dim=1), positions, cos_sin, *expected_pools.unbind(1), slots
    )
    rotary_store_kv_triton.rotary_store_kv_(
        *qkv.split(parts, dim=1), positions.to(device), cos_sin.to(device), *pools.unbind(1),
        slots.to(device),
    )  # fmt: skip
    pools, written = pools.cpu(), slots.long()
    assert_near(qkv[:, :heads], expected[:, :heads], dtype)
    assert_near(pools[written, 0], expected_pools[written, 0], dtype)
    assert torch.equal(qkv[:, :heads, rotated:].cpu(), expected[:, :heads, rotated:])
    assert torch.equal(pools[written, 0, :, rotated:], expected_pools[written, 0, :, rotated:])
    assert torch.equal(pools[written, 1], expected_pools[written, 1])
    assert torch.equal(qkv[:, -kv_heads:].cpu(), expected[:, -kv_heads:]), "values are left alone"
    assert torch.equal(pools.isnan(), expected_pools.isnan()), "so are other slots"


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_outside_the_table_makes_its_row_nan(device, position: int) -> None:
    q, kv = torch.ones(2, 2, 12, device=device), torch.ones(2, 1, 12, device=device)
    pools = torch.zeros(2, 4, 1, 12, device=device)
    positions, slots = (torch.tensor(each, device=device) for each in ([0, position], [1, 2]))
    cos_sin = torch.ones(5, 8, device=device)
    rotary_store_kv_triton.rotary_store_kv_(q, kv, kv.clone(), positions, cos_sin, *pools, slots)
    for rows in (q, pools[0, 1:3]):
        assert rows[0].isfinite().all()
        assert rows[1, :, :8].isnan().all()
        assert (rows[1, :, 8:] == 1).all()
    assert pools[1].sum(dim=(1, 2)).tolist() == [0, 12, 12, 0]


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_pool_is_not_written(device, slot: int) -> None:
    q, kv = torch.ones(2, 1, 8, device=device), torch.ones(2, 1, 8, device=device)
    memory = torch.zeros(12, 2, 1, 8, device=device)
    positions, slots = (torch.tensor(each, device=device) for each in ([1, 0], [slot, 2]))
    cos_sin = torch.tensor([1.0] * 4 + [0.0] * 4, device=device) * torch.tensor([[1], [3]])
    rotary_store_kv_triton.rotary_store_kv_(
        q, kv, kv.clone(), positions, cos_sin, *memory[4:8].unbind(1), slots
    )
    assert memory.sum(dim=(1, 2, 3)).tolist() == [0] * 6 + [16] + [0] * 5
    assert q.sum(dim=(1, 2)).tolist() == [24, 8], "queries are rotated all the same"


def test_rotated_rows_do_not_depend_on_each_other(dtype, device) -> None:
    """Padding rows, which share a slot, are among them."""
    torch.manual_seed(3)
    qkv = normal(7, 8, 80, dtype=dtype, device=device)
    positions, slots = torch.randint(50, (7,)), torch.tensor([3, 0, 5, 0, 1, 0, 8])
    positions, slots, cos_sin = (each.to(device) for each in (positions, slots, table(20)))

    def rotated(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Their queries, and the slots that only they have."""
        q, k, v = qkv[rows].split([4, 2, 2], dim=1)
        pools = torch.zeros(2, 9, 2, 80, dtype=dtype, device=device)
        rotary_store_kv_triton.rotary_store_kv_(
            q, k, v, positions[rows], cos_sin, *pools, slots[rows]
        )
        assert pools.isfinite().all()
        return q, pools[:, slots[rows][slots[rows] > 0]]

    order = torch.arange(7, device=device)
    together_q, together_stored = rotated(order)
    alone = [rotated(order[row : row + 1]) for row in range(7)]
    assert torch.equal(together_q, torch.cat([q for q, _ in alone]))
    assert torch.equal(together_stored, torch.cat([stored for _, stored in alone], dim=1))


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
    cos_sin = torch.ones(5, 8, device=device)
    rotary_store_kv_triton.rotary_store_kv_(heads, heads, heads, none, cos_sin, heads, heads, none)
