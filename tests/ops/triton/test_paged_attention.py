"""Attention against its reference, and the promise that a row's bits depend on its own keys alone.

Pools are NaN wherever no key of the plan is.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

from rollout.ops.paged_attention import reference
from rollout.ops.paged_attention.triton import listed_attention, paged_attention, tile_rows
from rollout.ops.paged_attention.work_list import Limits, list_sizes, work_list
from tests.helpers.attention_cases import (
    Case,
    Entry,
    Request,
    assert_bitwise,
    batch,
    decode_one_by_one,
    engine_step,
    make_case,
    on,
    random_entries,
    random_tree,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MORE = 1 if INTERPRETED else 4  # the interpreter is slow

ENTRIES = [
    Entry(0, 1),
    Entry(63, 1, [0, 1, 1]),
    Entry(64, 1),
    Entry(70, 5),
    Entry(55, 9, [0, 0, 2, 3]),
]


WHOLE = {"programs": 1, "part_rows": 0}  # an item per tile
CUT = {"programs": 4096, "part_rows": 1 << 20}  # per split; tiles of nodes have one row
SOME = {"programs": 1, "part_rows": 1 << 20}  # items of several splits


def case_on(device: torch.device, entries: list[Entry], *shape, **limits) -> Case:
    """Limits of the list, or none for those that the op itself knows."""
    case = make_case(entries, *shape)

    def op(q, k_pool, v_pool, plan, scale):
        q, k_pool, v_pool = (tensor.to(device) for tensor in (q, k_pool, v_pool))
        plan = on(device, plan)
        if limits:
            set_limits = Limits(**limits)
            sizes = list_sizes(plan, len(q), set_limits)
            work = work_list(plan, len(q), set_limits, sizes)
            return listed_attention(q, k_pool, v_pool, plan, scale, work).cpu()
        return paged_attention(q, k_pool, v_pool, plan, scale).cpu()

    return replace(case, op=op)


def assert_is_reference(case: Case) -> None:
    q, plan = batch(case.requests)
    out = case.op(q, case.k_pool, case.v_pool, plan, q.shape[-1] ** -0.5)
    expected = reference.paged_attention(q, case.k_pool, case.v_pool, plan, q.shape[-1] ** -0.5)
    # Probabilities are rounded to the values' dtype.
    tolerance = 5e-6 if q.dtype is torch.float32 else 4 * torch.finfo(q.dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 128), (8, 1, 24), (7, 1, 80)]
)
def test_paged_attention_is_the_reference(dtype, device, heads, kv_heads, head_dim) -> None:
    entries = ENTRIES if INTERPRETED else random_entries(head_dim, 12)
    assert_is_reference(case_on(device, entries, heads, kv_heads, head_dim, dtype))


def test_contexts_of_several_splits(compared_dtype, device) -> None:
    """One ends at a split's last key, one tree crosses into the next split."""
    entries = [Entry(1100, 2), Entry(511, 1), Entry(1020, 1, [0, 1, 2, 3, 4, 0])]
    for limits in (WHOLE, CUT, SOME):
        shape = (4, 2, 16, compared_dtype)
        assert_is_reference(case_on(device, entries, *shape, tile_queries=4, **limits))


def test_rows_do_not_depend_on_the_batch(compared_dtype, device) -> None:
    case = case_on(device, ENTRIES * MORE, 6, 3, 32, compared_dtype)
    together = case.run(padding=3)
    order = random.Random(0).sample(range(len(ENTRIES)), 3)
    for index, out in zip(order, case.run([case.requests[i] for i in order]), strict=True):
        assert_bitwise(out, together[index])
    for request, out in zip(case.requests, together, strict=True):
        assert_bitwise(case.run([request])[0], out)


def test_tiles_and_splits_change_no_bit(compared_dtype, device) -> None:
    """Programs that walk all splits, one or some of them, tiles of one or many rows."""
    entries = [Entry(505, 12), Entry(520, 3, [0, 0, 1, 2]), Entry(600, 1)]
    shape = (4, 1, 64, compared_dtype)
    expected = case_on(device, entries, *shape).run()
    most = tile_rows(compared_dtype, 4) // 4
    for tile_queries in (3, most) if INTERPRETED else (1, 2, 3, most):
        for limits in (WHOLE, CUT, SOME):
            case = case_on(device, entries, *shape, tile_queries=tile_queries, **limits)
            for out, wanted in zip(case.run(), expected, strict=True):
                assert_bitwise(out, wanted)


@pytest.mark.parametrize("nodes", [0, 3])
def test_steps_as_the_engine_pads_them(compared_dtype, device, nodes: int) -> None:
    """One long context among short ones, in their bucket: each request as it is alone."""
    trees = [random_tree(random.Random(b), nodes) for b in range(4)]
    starts = [1600, 30, 1, 513] if INTERPRETED else [16_000, 30, 1, 513, *range(900, 1000, 20)]
    entries = [Entry(start, 1, trees[b % 4]) for b, start in enumerate(starts)]
    case = case_on(device, entries, 2, 1, 16, compared_dtype)
    q, plan = batch(case.requests)
    padded_q, padded = engine_step(q, plan)
    out = case.op(padded_q, case.k_pool, case.v_pool, padded, q.shape[-1] ** -0.5)
    assert not out[len(q) :].any()
    for request, found in zip(case.requests, out[: len(q)].split(1 + nodes), strict=True):
        assert_bitwise(case.run([request])[0], found)


@pytest.mark.parametrize(("start", "run_len"), [(0, 1), (61, 9), (505, 12)])
def test_prefill_is_chunked_prefill_is_decode(compared_dtype, device, start, run_len) -> None:
    case = case_on(device, [Entry(start, run_len)], 3, 1, 64, compared_dtype)
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


@pytest.mark.parametrize(
    ("start", "run_len", "nodes"), [(0, 1, 8), (63, 1, 12), (90, 4, 20), (505, 3, 9)]
)
def test_a_path_of_a_tree_is_plain_decoding(compared_dtype, device, start, run_len, nodes) -> None:
    """Trees that begin a block, end one, need two, and cross into another split."""
    entry = Entry(start, run_len, random_tree(random.Random(start), nodes))
    case = case_on(device, [entry], 3, 1, 16, compared_dtype)
    request = case.requests[0]
    tree = case.run()[0]
    for leaf in (1, nodes // 2, nodes):
        path = [node for node in range(1, leaf + 1) if entry.mask(leaf) >> node & 1]
        rows = [run_len - 1, *(run_len - 1 + node for node in path)]
        slots = request.slots + [request.node_slots[node - 1] for node in path]
        q, root = request.q[rows], start + run_len - 1
        chain = case.run([Request(Entry(root, len(rows)), q, slots, [])])[0]
        assert_bitwise(chain, tree[rows])
        if leaf == nodes:
            assert_bitwise(decode_one_by_one(case, q, slots, root), tree[rows])


def test_a_chain_of_63_nodes(device) -> None:
    entry = Entry(126, 2, list(range(63)))
    case = case_on(device, [entry], 1, 1, 16)
    request = case.requests[0]
    chain = Request(Entry(127, 64), request.q[1:], request.slots + request.node_slots, [])
    assert_bitwise(case.run([chain])[0], case.run()[0][1:])


def test_the_last_rows_of_an_entry_alone_are_the_same(compared_dtype, device) -> None:
    """Keys and values of the rows before them are in the pools already. Some entries have none."""
    case = case_on(device, ENTRIES, 4, 2, 32, compared_dtype)
    whole = case.run()
    q, plan = batch(case.requests)
    kept = [0, 2, 1, 0, 6]
    plan.q_offsets_B1 = torch.tensor([0, *kept], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q_last = torch.cat([r.q[len(r.q) - n :] for r, n in zip(case.requests, kept, strict=True)])
    expected = torch.cat([o[len(o) - n :] for o, n in zip(whole, kept, strict=True)])
    out = case.op(q_last, case.k_pool, case.v_pool, plan, q.shape[-1] ** -0.5)
    assert_bitwise(out, expected)


def test_a_plan_serves_layers_of_other_shapes(device) -> None:
    case = case_on(device, [Entry(40, 20), Entry(3, 1, [0, 0])], 6, 2, 16)
    q, plan = batch(case.requests)
    k_pool, v_pool = (pool.to(device) for pool in (case.k_pool, case.v_pool))
    plan = on(device, plan)
    for heads in (2, 6, 4):
        out = paged_attention(q[:, :heads].to(device), k_pool, v_pool, plan, 0.25)
        expected = case.op(q[:, :heads], case.k_pool, case.v_pool, plan, 0.25)
        assert_bitwise(out.cpu(), expected)


def test_strided_views_of_fused_tensors(compared_dtype, device) -> None:
    case = case_on(device, ENTRIES[:3], 6, 2, 16, compared_dtype)
    q, plan = batch(case.requests)
    expected = case.op(q, case.k_pool, case.v_pool, plan, 0.25)
    qkv = torch.cat((q, torch.full((len(q), 4, 16), torch.nan, dtype=q.dtype)), dim=1)
    pool = torch.stack((case.k_pool, case.v_pool), dim=1)
    out = case.op(qkv[:, :6], pool[:, 0], pool[:, 1], plan, 0.25)
    assert out.is_contiguous()
    assert_bitwise(out, expected)


@pytest.mark.parametrize("limits", [WHOLE, CUT], ids=["whole", "cut"])
def test_padding_rows_are_zero_and_a_batch_may_be_empty(device, limits) -> None:
    case = case_on(device, [Entry(3, 2)], 2, 1, 16, tile_queries=4, **limits)
    for requests in (case.requests, []):
        q, plan = batch(requests, padding=5)
        q = q if requests else torch.full((5, 2, 16), torch.nan)
        out = case.op(q, case.k_pool, case.v_pool, plan, 1.0)
        assert out.shape == q.shape
        assert not out[-5:].any()
        assert out[:-5].isfinite().all()


def test_a_node_gone_to_infinity_leaves_other_paths_alone(device) -> None:
    case = case_on(device, [Entry(5, 2, [0, 0, 1])], 2, 1, 16)
    expected = case.run()[0]
    slot = case.requests[0].node_slots[0]  # node 1, on the path of node 3
    case.k_pool[slot], case.v_pool[slot] = -torch.inf, torch.inf
    out = case.run()[0]
    assert_bitwise(out[[0, 1, 3]], expected[[0, 1, 3]])
    assert not out[[2, 4]].isfinite().any()


def test_scores_far_apart_do_not_overflow(device) -> None:
    case = case_on(device, [Entry(40, 3)], 2, 1, 16)
    case.requests[0].q.mul_(1000)
    assert_is_reference(case)
