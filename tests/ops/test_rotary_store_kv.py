from __future__ import annotations

import pytest
import torch

from rollout.ops import gpu
from rollout.ops.rotary_store_kv import native, reference, rotary_store_kv_


def fused_heads(rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device):
    """q, k and v as strided views into one fused projection."""
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(device, dtype)
    return qkv.split([heads, kv_heads, kv_heads], dim=1)


def interleaved_pools(slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device):
    """Pools of keys and of values that alternate slot by slot in memory, filled with NaN."""
    pools = torch.full((slots, 2, kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    return pools.unbind(1)


def table(positions: int, rotated: int) -> torch.Tensor:
    angles = torch.rand(positions, rotated // 2) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)


SHAPES = [  # rows, heads, kv heads, head dim, rotated dims
    (0, 2, 1, 8, 8), (1, 4, 2, 8, 8), (7, 4, 2, 24, 16), (5, 5, 1, 80, 20), (4, 9, 11, 128, 128),
    (7, 4, 2, 128, 2), (4, 3, 2, 24, 0), (300, 4, 2, 64, 64),
]  # fmt: skip


@pytest.mark.parametrize(("threads", "index_dtype"), [(1, torch.int32), (2, torch.int64)])
def test_it_is_the_reference(dtype, device, is_gpu, index_dtype, threads, set_threads) -> None:
    set_threads(threads)
    eps = 2 * torch.finfo(dtype).eps if dtype is not torch.float32 else 4e-6
    near = {"rtol": eps, "atol": 2e-6} if is_gpu else {"rtol": 0, "atol": 0}
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    for rows, *shape, rotated in SHAPES[:-1] if is_gpu else SHAPES:
        heads, kv_heads, head_dim = shape
        torch.manual_seed(head_dim)
        heads_of = fused_heads(rows, *shape, dtype, "cpu")
        pools = interleaved_pools(2 * rows, *shape[1:], dtype, "cpu")
        positions, cos_sin = torch.randint(50, (rows,), dtype=index_dtype), table(50, rotated)
        slots = torch.randperm(2 * rows)[:rows].to(index_dtype)
        q, k, v = torch.cat(heads_of, dim=1).to(device).split([heads, kv_heads, kv_heads], dim=1)
        own_pools = torch.stack(pools, dim=1).to(device).unbind(1)
        assert (gpu if is_gpu else native).supports(q, k, v, *own_pools)
        on_device = [tensor.to(device) for tensor in (positions, cos_sin, slots)]
        rotary_store_kv_(q, k, v, *on_device[:2], *own_pools, on_device[2])
        reference.rotary_store_kv_(*heads_of, positions, cos_sin, *pools, slots)
        keys, values = own_pools[0].cpu(), own_pools[1].cpu()
        torch.testing.assert_close(q.cpu(), heads_of[0], **near)
        torch.testing.assert_close(keys, pools[0], **near, equal_nan=True)
        torch.testing.assert_close(values, pools[1], **exact)
        torch.testing.assert_close(keys[..., rotated:], pools[0][..., rotated:], **exact)
        assert torch.equal(q[..., rotated:].cpu(), heads_of[0][..., rotated:])
        assert torch.equal(v.cpu(), heads_of[2]), "values are left alone"


def test_keys_alone_are_stored_alike(dtype, device) -> None:
    """As latent attention has them: one key of many dims, none a power of two."""
    q, k, v = fused_heads(7, 5, 1, 44, dtype, device)
    positions, cos_sin = torch.randint(50, (7,)).to(device), table(50, 12).to(device)
    slots = torch.randperm(14)[:7].to(device)
    pools = interleaved_pools(14, 1, 44, dtype, device)
    alone_q, alone = q.clone(), interleaved_pools(14, 1, 44, dtype, device)
    rotary_store_kv_(alone_q, k.clone(), None, positions, cos_sin, alone[0], None, slots)
    rotary_store_kv_(q, k, v, positions, cos_sin, *pools, slots)
    assert torch.equal(alone_q, q)
    torch.testing.assert_close(alone[0], pools[0], rtol=0, atol=0, equal_nan=True)
    assert alone[1].isnan().all()


def test_rows_do_not_depend_on_each_other(dtype, device, rounds, set_threads) -> None:
    torch.manual_seed(0)
    rows = rounds(200)
    q, k, v = fused_heads(rows, 9, 3, 64, dtype, device)
    positions, slots = torch.randint(500, (rows,)), torch.randperm(rows)
    positions, cos_sin, slots = (each.to(device) for each in (positions, table(500, 64), slots))
    alone_q, alone_k = q.clone(), k.clone()
    alone_pools, pools = (interleaved_pools(rows, 3, 64, dtype, device) for _ in range(2))
    for row in range(rows):
        own = slice(row, row + 1)
        rotary_store_kv_(
            alone_q[own], alone_k[own], v[own], positions[own], cos_sin, *alone_pools, slots[own]
        )
    set_threads(2)
    rotary_store_kv_(q, k, v, positions, cos_sin, *pools, slots)
    assert torch.equal(q, alone_q)
    for pool, alone in zip(pools, alone_pools, strict=True):
        assert torch.equal(pool, alone)


def test_nothing_is_stored_where_a_position_or_a_slot_is_refused() -> None:
    q, k, v = fused_heads(2, 2, 1, 8, torch.float32, "cpu")
    pool = torch.zeros(4, 1, 8)
    for position, slot, named in (
        (-1, 0, "positions_T"), (5, 0, "positions_T"), (0, -1, "slots_T"), (0, 4, "slots_T"),
    ):  # fmt: skip
        positions, slots = torch.tensor([0, position]), torch.tensor([3, slot])
        with pytest.raises(IndexError, match=named):
            native.rotary_store_kv_(q, k, v, positions, table(5, 8), pool, pool, slots)
        assert not pool.any()
