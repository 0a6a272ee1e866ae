from __future__ import annotations

import pytest
import torch

from rollout.ops.store_kv import native, reference, store_kv


@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 1, 8), (5, 3, 64), (300, 3, 80)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("threads", [1, 2])
def test_store_kv_is_the_reference(
    dtype: torch.dtype,
    rows: int,
    heads: int,
    head_dim: int,
    slot_dtype: torch.dtype,
    threads: int,
    set_threads,
) -> None:
    torch.manual_seed(rows)
    set_threads(threads)
    k, v = torch.randn(rows, 5, heads, head_dim).to(dtype)[:, 1:3].unbind(1)
    slots = torch.randperm(2 * rows)[:rows].to(slot_dtype)
    pools = torch.full((2, 2 * rows, heads, head_dim), torch.nan, dtype=dtype)
    expected = pools.clone()
    assert native.supports(k, v, *pools)
    store_kv(k, v, *pools, slots)
    reference.store_kv(k, v, *expected, slots)
    torch.testing.assert_close(pools, expected, rtol=0, atol=0, equal_nan=True)


def test_pools_may_be_interleaved() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 4, 3, 8)
    pool = torch.zeros(6, 2, 3, 8)
    store_kv(k, v, pool[:, 0], pool[:, 1], torch.tensor([5, 0, 3, 2]))
    assert torch.equal(pool[[5, 0, 3, 2]], torch.stack((k, v), dim=1))
    assert not pool[[1, 4]].any()


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(slot: int) -> None:
    k, pool = torch.ones(2, 1, 8), torch.zeros(4, 1, 8)
    with pytest.raises(IndexError, match="slots_T"):
        store_kv(k, k, pool, pool, torch.tensor([0, slot]))
    assert not pool.any()
