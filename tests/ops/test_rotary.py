from __future__ import annotations

import pytest
import torch

from rollout.ops.rotary import native, reference, rotary_


def fused_heads(rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
    """q and k as strided views into one fused projection."""
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(dtype)
    q, k, _ = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    return qkv, q.view(rows, heads, head_dim), k.view(rows, kv_heads, head_dim)


def table(positions: int, rotated: int) -> torch.Tensor:
    angles = torch.rand(positions, rotated // 2) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize(("head_dim", "rotated"), [(8, 8), (24, 16), (64, 64), (80, 20), (128, 2)])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_rotary_is_the_reference(
    dtype: torch.dtype, head_dim: int, rotated: int, position_dtype: torch.dtype
) -> None:
    torch.manual_seed(head_dim)
    qkv, q, k = fused_heads(7, 4, 2, head_dim, dtype)
    assert native.supports(q, k)
    expected_q, expected_k, untouched_v = q.clone(), k.clone(), qkv[:, 6 * head_dim :].clone()
    positions, cos_sin = torch.randint(50, (7,), dtype=position_dtype), table(50, rotated)
    reference.rotary_(expected_q, expected_k, positions, cos_sin)
    rotary_(q, k, positions, cos_sin)
    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)
    assert torch.equal(qkv[:, 6 * head_dim :], untouched_v)


def test_rows_do_not_depend_on_each_other(dtype: torch.dtype, set_threads) -> None:
    torch.manual_seed(0)
    _, q, k = fused_heads(200, 9, 3, 64, dtype)
    positions, cos_sin = torch.randint(500, (200,)), table(500, 64)
    one_by_one = []
    set_threads(1)
    for row in range(200):
        q_row, k_row = q[row : row + 1].clone(), k[row : row + 1].clone()
        rotary_(q_row, k_row, positions[row : row + 1], cos_sin)
        one_by_one.append(torch.cat((q_row, k_row), dim=1))
    set_threads(2)
    rotary_(q, k, positions, cos_sin)
    assert torch.equal(torch.cat((q, k), dim=1), torch.cat(one_by_one))


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_outside_the_table_is_refused(position: int) -> None:
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    with pytest.raises(IndexError, match="positions_T"):
        rotary_(q, k, torch.tensor([position]), table(5, 8))
