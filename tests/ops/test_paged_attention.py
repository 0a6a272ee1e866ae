"""Attention against its reference, and the promise that a row's bits depend on its own keys alone.

Pools are NaN wherever no key of the plan is, so a key read by a row that must not see it shows.
"""

from __future__ import annotations

import random

import pytest
import torch

from rollout.errors import InvalidInputError
from rollout.ops.paged_attention import AttentionPlan, native, paged_attention, reference
from tests.helpers.attention_cases import (
    Case,
    Entry,
    Request,
    assert_bitwise,
    batch,
    decode_one_by_one,
    make_case,
    random_entries,
    random_tree,
)


def assert_is_reference(case: Case) -> None:
    q, plan = batch(case.requests)
    scale = q.shape[-1] ** -0.5
    assert native.supports(q, case.k_pool, case.v_pool)
    out = paged_attention(q, case.k_pool, case.v_pool, plan, scale)
    expected = reference.paged_attention(q, case.k_pool, case.v_pool, plan, scale)
    eps = 0 if q.dtype is torch.float32 else torch.finfo(q.dtype).eps
    torch.testing.assert_close(out, expected, rtol=eps, atol=5e-6 + eps / 8)


@pytest.mark.parametrize("head_dim", [7, 8, 16, 24, 64, 80, 128])
def test_paged_attention_is_the_reference(dtype: torch.dtype, head_dim: int) -> None:
    entries = random_entries(seed=head_dim, count=5)
    assert_is_reference(make_case(entries, head_dim=head_dim, dtype=dtype, seed=head_dim))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (4, 4), (7, 1), (16, 2), (60, 1)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    assert_is_reference(make_case(random_entries(seed=heads, count=4), heads, kv_heads))


def test_a_long_context_is_cut_into_smaller_tiles() -> None:
    case = make_case([Entry(9000, 9), Entry(7, 1, [0, 0, 1])], 30, 1, 8)
    assert_is_reference(case)
    assert_bitwise(case.run()[1], case.run(case.requests[1:])[0])


@pytest.mark.parametrize("seed", range(4))
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, seed: int, set_threads) -> None:
    case = make_case(random_entries(seed, 8), 9, 3, 24, dtype, seed)
    set_threads(2)
    together = case.run(padding=3)
    order = random.Random(seed).sample(range(8), 5)
    for index, out in zip(order, case.run([case.requests[i] for i in order]), strict=True):
        assert_bitwise(out, together[index])
    set_threads(1)
    for request, out in zip(case.requests, together, strict=True):
        assert_bitwise(case.run([request])[0], out)


@pytest.mark.parametrize(("start", "run_len"), [(0, 1), (0, 70), (61, 9), (200, 33)])
def test_prefill_is_chunked_prefill_is_decode(dtype: torch.dtype, start: int, run_len: int) -> None:
    case = make_case([Entry(start, run_len)], 9, 3, 64, dtype)
    request = case.requests[0]
    whole = case.run()[0]
    assert_bitwise(decode_one_by_one(case, request.q, request.slots, start), whole)
    cut = run_len // 3
    if cut:
        chunks = [
            Request(Entry(start, cut), request.q[:cut], request.slots[: start + cut], []),
            Request(Entry(start + cut, run_len - cut), request.q[cut:], request.slots, []),
        ]
        assert_bitwise(torch.cat(case.run(chunks)), whole)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("start", "run_len"), [(0, 1), (63, 1), (90, 4), (127, 40)])
def test_a_path_of_a_tree_is_plain_decoding(
    dtype: torch.dtype, seed: int, start: int, run_len: int
) -> None:
    entry = Entry(start, run_len, random_tree(random.Random(seed), 63))
    case = make_case([entry], 9, 3, 24, dtype, seed)
    request = case.requests[0]
    tree = case.run()[0]
    for leaf in (1, 17, 40, 63):
        path = [node for node in range(1, leaf + 1) if entry.mask(leaf) >> node & 1]
        rows = [run_len - 1, *(run_len - 1 + node for node in path)]
        slots = request.slots + [request.node_slots[node - 1] for node in path]
        q, root = request.q[rows], start + run_len - 1
        chain = case.run([Request(Entry(root, len(rows)), q, slots, [])])[0]
        assert_bitwise(chain, tree[rows])
        assert_bitwise(decode_one_by_one(case, q, slots, root), tree[rows])


@pytest.mark.parametrize("seed", range(4))
def test_the_last_rows_of_an_entry_alone_are_the_same(dtype: torch.dtype, seed: int) -> None:
    """Keys and values of the rows before them are in the pools already."""
    case = make_case(random_entries(seed, 5), dtype=dtype, seed=seed)
    rng = random.Random(seed)
    whole = case.run()
    q, plan = batch(case.requests)
    kept = [rng.randint(0, request.entry.num_rows) for request in case.requests]
    plan.q_offsets_B1 = torch.tensor([0, *kept], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q_last = torch.cat([r.q[len(r.q) - n :] for r, n in zip(case.requests, kept, strict=True)])
    expected = torch.cat([o[len(o) - n :] for o, n in zip(whole, kept, strict=True)])
    scale = q.shape[-1] ** -0.5
    assert_bitwise(paged_attention(q_last, case.k_pool, case.v_pool, plan, scale), expected)
    torch.testing.assert_close(
        reference.paged_attention(q_last, case.k_pool, case.v_pool, plan, scale),
        expected, rtol=1e-2, atol=1e-2,
    )  # fmt: skip


def test_scratch_left_by_another_call_is_not_read(set_threads) -> None:
    case = make_case(random_entries(1, 6), dtype=torch.bfloat16)
    poison = Case(case.requests, case.k_pool * torch.nan, case.v_pool * torch.nan)
    set_threads(1)
    clean = torch.cat(case.run())
    assert torch.cat(poison.run()).isnan().all()
    assert_bitwise(torch.cat(case.run()), clean)


def test_a_later_token_gone_to_infinity_leaves_earlier_rows_alone() -> None:
    case = make_case([Entry(5, 12)])
    expected = case.run()[0][:7]
    slot = case.requests[0].slots[5 + 7]
    case.k_pool[slot], case.v_pool[slot] = -torch.inf, torch.inf
    out = case.run()[0]
    assert_bitwise(out[:7], expected)
    assert not out[7:].isfinite().all()


def test_strided_views_of_fused_tensors() -> None:
    case = make_case(random_entries(3, 4), 6, 2, 16, torch.bfloat16)
    q, plan = batch(case.requests)
    expected = paged_attention(q, case.k_pool, case.v_pool, plan, 0.25)
    qkv = torch.cat((q, torch.full((len(q), 4, 16), torch.nan, dtype=q.dtype)), dim=1)
    pool = torch.stack((case.k_pool, case.v_pool), dim=1)
    out = paged_attention(qkv[:, :6], pool[:, 0], pool[:, 1], plan, 0.25)
    assert out.is_contiguous()
    assert_bitwise(out, expected)


def test_padding_rows_are_zero_and_a_batch_may_be_empty() -> None:
    case = make_case([Entry(3, 2)])
    for requests in (case.requests, []):
        q, plan = batch(requests, padding=4)
        out = (
            paged_attention(
                q, case.k_pool[:, :, : q.shape[2]], case.v_pool[:, :, : q.shape[2]], plan, 1.0
            )
            if requests
            else paged_attention(q, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), plan, 1.0)
        )
        assert out.shape == q.shape
        assert not out[-4:].any()


def test_equal_scores_average_the_values() -> None:
    case = make_case([Entry(99, 1)], 1, 1, 8)
    case.requests[0].q.zero_()
    mean = case.v_pool[case.requests[0].slots].mean(0, keepdim=True)
    torch.testing.assert_close(case.run()[0], mean, rtol=0, atol=1e-6)


def test_scores_far_apart_do_not_overflow() -> None:
    case = make_case([Entry(40, 3)])
    case.requests[0].q.mul_(1000)
    assert_is_reference(case)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows_B", 9),
        ("starts_B", 1000),
        ("starts_B", -1),
        ("run_lens_B", 0),
        ("q_offsets_B1", 1),
        ("node_slots_N", 10**6),
        ("node_slots_N", -1),
        ("node_masks_N", 0b110),
        ("node_masks_N", 0b1011),
        ("req_to_token", -1),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(name: str, value: int) -> None:
    case = make_case([Entry(3, 2, [0, 1])])
    q, plan = batch(case.requests)
    getattr(plan, name).view(-1)[0 if name != "req_to_token" else slice(None)] = value
    with pytest.raises(ValueError, match=name):
        paged_attention(q, case.k_pool, case.v_pool, plan, 1.0)


def test_one_plan_serves_models_of_different_shapes() -> None:
    case = make_case(random_entries(5, 3), 6, 2, 16)
    q, plan = batch(case.requests)
    for heads in (6, 4, 6):
        out = paged_attention(q[:, :heads], case.k_pool, case.v_pool, plan, 0.25)
        expected = reference.paged_attention(q[:, :heads], case.k_pool, case.v_pool, plan, 0.25)
        torch.testing.assert_close(out, expected, rtol=0, atol=5e-6)


def test_a_plan_of_other_dtypes_is_refused() -> None:
    _, plan = batch(make_case([Entry(3, 2)]).requests)
    made_later = ("schedule", "node_keys", "work")
    fields = {name: getattr(plan, name) for name in plan.__slots__ if name not in made_later}
    with pytest.raises(InvalidInputError, match="starts_B"):
        AttentionPlan(**fields | {"starts_B": plan.starts_B.long()})
    with pytest.raises(InvalidInputError, match="req_to_token"):
        AttentionPlan(**fields | {"req_to_token": plan.req_to_token.t()})
