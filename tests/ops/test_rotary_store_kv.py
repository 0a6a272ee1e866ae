from __future__ import annotations

import pytest
import torch

from rollout.ops.rotary_store_kv import native, reference, rotary_store_kv_


def fused_heads(rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
    """q, k and v as strided views into one fused projection."""
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(dtype)
    return qkv.split([heads, kv_heads, kv_heads], dim=1)


def interleaved_pools(slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
    """Of keys and of values, slot by slot; NaN."""
    return torch.full((slots, 2, kv_heads, head_dim), torch.nan, dtype=dtype).unbind(1)


def table(positions: int, rotated: int) -> torch.Tensor:
    angles = torch.rand(positions, rotated // 2) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def assert_equal(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "head_dim", "rotated"),
    [(1, 8, 8), (7, 24, 16), (300, 64, 64), (5, 80, 20), (7, 128, 2), (4, 16, 0)],
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_the_reference(
    dtype, rows: int, head_dim: int, rotated: int, index_dtype, threads: int, set_threads
) -> None:
    torch.manual_seed(head_dim)
    set_threads(threads)
    q, k, v = fused_heads(rows, 4, 2, head_dim, dtype)
    pools = interleaved_pools(2 * rows, 2, head_dim, dtype)
    assert native.supports(q, k, v, *pools)
    positions, cos_sin = torch.randint(50, (rows,), dtype=index_dtype), table(50, rotated)
    slots = torch.randperm(2 * rows)[:rows].to(index_dtype)
    expected_q, expected_k, expected_v = q.clone(), k.clone(), v.clone()
    expected_pools = [pool.clone() for pool in pools]
    reference.rotary_store_kv_(
        expected_q, expected_k, expected_v, positions, cos_sin, *expected_pools, slots
    )
    rotary_store_kv_(q, k, v, positions, cos_sin, *pools, slots)
    assert torch.equal(q, expected_q)
    assert torch.equal(v, expected_v)
    assert_equal(list(pools), expected_pools)


def test_rows_do_not_depend_on_each_other(dtype, set_threads) -> None:
    torch.manual_seed(0)
    q, k, v = fused_heads(200, 9, 3, 64, dtype)
    positions, cos_sin = torch.randint(500, (200,)), table(500, 64)
    slots = torch.randperm(200)
    alone_q, alone_k = q.clone(), k.clone()
    alone_pools, pools = (interleaved_pools(200, 3, 64, dtype) for _ in range(2))
    set_threads(1)
    for row in range(200):
        own = slice(row, row + 1)
        rotary_store_kv_(
            alone_q[own], alone_k[own], v[own], positions[own], cos_sin, *alone_pools, slots[own]
        )
    set_threads(2)
    rotary_store_kv_(q, k, v, positions, cos_sin, *pools, slots)
    assert torch.equal(q, alone_q)
    for pool, alone in zip(pools, alone_pools, strict=True):
        assert torch.equal(pool, alone)


def test_padding_rows_share_a_slot() -> None:
    q, k, v = fused_heads(5, 2, 1, 8, torch.float32)
    pools = interleaved_pools(6, 1, 8, torch.float32)
    cos_sin = torch.tensor([[1.0] * 4 + [0.0] * 4])  # nothing turns
    before = k.clone()
    rotary_store_kv_(q, k, v, torch.zeros(5).int(), cos_sin, *pools, torch.tensor([4, 2, 0, 0, 0]))
    for rows, pool in zip((before, v), pools, strict=True):
        assert torch.equal(pool[[4, 2]], rows[:2])
        assert pool[0].isfinite().all()
        assert pool[[1, 3, 5]].isnan().all()


@pytest.mark.parametrize(
    ("position", "slot", "named"),
    [(-1, 0, "positions_T"), (5, 0, "positions_T"), (0, -1, "slots_T"), (0, 4, "slots_T")],
)
def test_nothing_is_stored_where_a_position_or_a_slot_is_refused(position, slot, named) -> None:
    q, k, v = fused_heads(2, 2, 1, 8, torch.float32)
    pool = torch.zeros(4, 1, 8)
    positions, slots = torch.tensor([0, position]), torch.tensor([3, slot])
    with pytest.raises(IndexError, match=named):
        rotary_store_kv_(q, k, v, positions, table(5, 8), pool, pool, slots)
    assert not pool.any()


def test_no_rows() -> None:
    q, k, v = fused_heads(0, 2, 1, 8, torch.float32)
    pool, none = torch.zeros(4, 1, 8), torch.empty(0, dtype=torch.int64)
    rotary_store_kv_(q, k, v, none, table(5, 8), pool, pool, none)
    assert not pool.any()
