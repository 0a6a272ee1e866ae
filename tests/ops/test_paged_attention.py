"""Attention against its reference, and the promise that a row's bits depend on its own keys alone.

Pools are NaN wherever no key of the plan is, so a key read by a row that must not see it shows.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from rollout.ops import gpu
from rollout.ops.paged_attention import (
    AttentionVariant,
    native,
    paged_attention,
    reference,
)
from tests.helpers.attention_cases import (
    Case,
    Entry,
    Request,
    assert_bitwise,
    batch,
    case_on,
    decode_one_by_one,
    make_case,
    random_entries,
    random_tree,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENTRIES = [Entry(0, 1), Entry(63, 1, [0, 1, 1]), Entry(64, 1), Entry(70, 5), Entry(55, 9, [0, 0, 2, 3])]  # fmt: skip  # noqa: E501


def entries_of(seed: int, count: int) -> list[Entry]:
    """Random ones, or a few where the interpreter is slow."""
    return ENTRIES if INTERPRETED else random_entries(seed, count)


@pytest.fixture
def assert_is_reference(is_gpu) -> Callable[[Case], None]:
    def compare(case: Case) -> None:
        q, plan = batch(case.requests)
        scale = q.shape[-1] ** -0.5
        out = case.op(q, case.k_pool, case.v_pool, plan, scale)
        expected = reference.paged_attention(q, case.k_pool, case.v_pool, plan, scale)
        eps = 0 if q.dtype is torch.float32 else torch.finfo(q.dtype).eps
        rtol, atol = eps, 5e-6 + eps / 8
        if is_gpu:  # probabilities are rounded to the values' dtype
            rtol = atol = max(5e-6, 4 * eps)
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)

    return compare


def test_paged_attention_is_the_reference(dtype, device, assert_is_reference) -> None:
    shapes = [(6, 2, 7), (1, 1, 16), (8, 1, 24), (9, 3, 64), (7, 1, 80), (2, 2, 128), (60, 1, 16)]
    for heads, kv_heads, head_dim in shapes[2:5] if INTERPRETED else shapes:
        case = case_on(device, entries_of(head_dim, 5), heads, kv_heads, head_dim, dtype)
        pools = (case.requests[0].q.to(device), case.k_pool.to(device))
        assert native.supports(*pools) or gpu.supports(*pools)
        assert_is_reference(case)


VARIANTS = {
    "one key": {"window": 1},
    "wide window": {"window": 70},
    "cap": {"soft_cap": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 21, "soft_cap": 1.5, "sinks": True},
}


EXACT = ["plain", "one key", "wide window", "all"]


def variant_of(name: str, heads: int, device: torch.device) -> AttentionVariant:
    options = dict(VARIANTS.get(name, {}))
    if options.pop("sinks", False):
        sinks_H = torch.linspace(-3, 2, heads)
        sinks_H[-1] = 60.0
        options["sinks_H"] = sinks_H.to(device)
    return AttentionVariant(**options)


def op_of(name: str, heads: int, device: torch.device) -> Callable[..., torch.Tensor]:
    return partial(paged_attention, variant=variant_of(name, heads, device))


def without_what_no_window_sees(case: Case, window: int | None) -> Case:
    """NaN in the slots before the first row's window."""
    for request in case.requests if window is not None else ():
        hidden = request.slots[: max(request.entry.start + 1 - window, 0)]
        case.k_pool[hidden] = case.v_pool[hidden] = torch.nan
    return case


def test_variants_are_the_reference(dtype, device, is_gpu) -> None:
    eps = 0 if dtype is torch.float32 else torch.finfo(dtype).eps
    tolerance = max(5e-6, (4 if is_gpu else 1) * eps)
    for name in VARIANTS:
        shape = (4, 1, 24) if name == "all" else (6, 2, 16)
        op = op_of(name, shape[0], device)
        case = case_on(device, entries_of(3, 6), *shape, dtype, op=op)
        on_cpu = variant_of(name, shape[0], torch.device("cpu"))
        without_what_no_window_sees(case, on_cpu.window)
        q, plan = batch(case.requests)
        out = case.op(q, case.k_pool, case.v_pool, plan, 0.3)
        expected = reference.paged_attention(q, case.k_pool, case.v_pool, plan, 0.3, on_cpu)
        assert expected.isfinite().all()
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_a_value_outside_a_rows_window_is_not_read() -> None:
    """Some rows of one tile see a token that is not finite."""
    variant = AttentionVariant(window=9)
    op = partial(native.paged_attention, variant=variant)
    case = replace(make_case([Entry(80, 15)], 3, 1, 16), op=op)
    clean = case.run()[0]
    case.v_pool[case.requests[0].slots[82]] = torch.nan
    found = case.run()[0]
    sees = torch.arange(15).sub(2).abs().lt(variant.window) & (torch.arange(15) >= 2)
    assert torch.equal(found.isnan().flatten(1).any(1), sees)
    assert_bitwise(found[~sees], clean[~sees])


def test_a_long_context_is_cut_into_smaller_tiles(device, assert_is_reference) -> None:
    start = 1100 if INTERPRETED else 9000
    case = case_on(device, [Entry(start, 9), Entry(7, 1, [0, 0, 1])], 30, 1, 8)
    assert_is_reference(case)
    assert_bitwise(case.run()[1], case.run(case.requests[1:])[0])


def test_rows_do_not_depend_on_the_batch(compared_dtype, device, set_threads) -> None:
    for name in EXACT:
        op = op_of(name, 9, device)
        case = case_on(device, entries_of(0, 10), 9, 3, 24, compared_dtype, op=op)
        set_threads(2)
        together = case.run(padding=3)
        order = random.Random(0).sample(range(len(together)), 3)
        for index, out in zip(order, case.run([case.requests[i] for i in order]), strict=True):
            assert_bitwise(out, together[index])
        set_threads(1)
        for request, out in zip(case.requests, together, strict=True):
            assert_bitwise(case.run([request])[0], out)


@pytest.mark.parametrize("name", EXACT)
def test_prefill_is_chunked_prefill_is_decode(compared_dtype, device, name) -> None:
    for start, run_len in ((0, 70), (61, 9), (505, 12)):
        op = op_of(name, 3, device)
        case = case_on(device, [Entry(start, run_len)], 3, 1, 64, compared_dtype, op=op)
        request = case.requests[0]
        whole = case.run()[0]
        if not (INTERPRETED and run_len > 9):
            assert_bitwise(decode_one_by_one(case, request.q, request.slots, start), whole)
        cut = run_len // 3
        chunks = [
            Request(Entry(start, cut), request.q[:cut], request.slots[: start + cut], []),
            Request(Entry(start + cut, run_len - cut), request.q[cut:], request.slots, []),
        ]
        assert_bitwise(torch.cat(case.run(chunks)), whole)


TREES = [(0, 1, 63), (63, 1, 12), (505, 3, 9), (127, 40, 63), (126, 2, None), (120, 4, 20)]
"""Starts, runs and nodes of trees that begin a block, end one, need two, and cross into another
split; None: a chain."""


@pytest.mark.parametrize("name", EXACT)
def test_a_path_of_a_tree_is_plain_decoding(compared_dtype, device, name) -> None:
    most = 20 if INTERPRETED else 63
    for start, run_len, nodes in TREES if name == "plain" or not INTERPRETED else TREES[-1:]:
        parents = list(range(most))
        if nodes is not None:
            parents = random_tree(random.Random(0), min(nodes, most))
        entry = Entry(start, run_len, parents)
        case = case_on(device, [entry], 3, 1, 16, compared_dtype, op=op_of(name, 3, device))
        request, last = case.requests[0], len(parents)
        tree = case.run()[0]
        for leaf in (1, last // 2, last):
            path = [node for node in range(1, leaf + 1) if entry.mask(leaf) >> node & 1]
            rows = [run_len - 1, *(run_len - 1 + node for node in path)]
            slots = request.slots + [request.node_slots[node - 1] for node in path]
            q, root = request.q[rows], start + run_len - 1
            chain = case.run([Request(Entry(root, len(rows)), q, slots, [])])[0]
            assert_bitwise(chain, tree[rows])
            if leaf == last:
                assert_bitwise(decode_one_by_one(case, q, slots, root), tree[rows])


def test_the_last_rows_of_an_entry_alone_are_the_same(compared_dtype, device) -> None:
    """Keys and values of the rows before them are in the pools already. Some entries have none."""
    case = case_on(device, entries_of(0, 9), 4, 2, 32, compared_dtype)
    rng = random.Random(0)
    whole = case.run()
    q, plan = batch(case.requests)
    kept = [rng.randint(0, request.entry.num_rows) for request in case.requests]
    plan.q_offsets_B1 = torch.tensor([0, *kept], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q_last = torch.cat([r.q[len(r.q) - n :] for r, n in zip(case.requests, kept, strict=True)])
    expected = torch.cat([o[len(o) - n :] for o, n in zip(whole, kept, strict=True)])
    arguments = (q_last, case.k_pool, case.v_pool, plan, q.shape[-1] ** -0.5)
    assert_bitwise(case.op(*arguments), expected)
    torch.testing.assert_close(
        reference.paged_attention(*arguments), expected, rtol=1e-2, atol=1e-2
    )


def test_a_later_token_or_a_node_gone_to_infinity_leaves_others_alone(device, is_gpu) -> None:
    """On a GPU a node does; of a run, whose rows are one request's, zero times infinity is NaN."""
    case = case_on(device, [Entry(5, 12), Entry(5, 2, [0, 0, 1])], 2, 1, 16)
    run, tree = case.run()
    requests = case.requests
    for slot in (requests[0].slots[5 + 7], requests[1].node_slots[0]):  # node 1, above node 3
        case.k_pool[slot], case.v_pool[slot] = -torch.inf, torch.inf
    broken_run, broken_tree = case.run()
    if not is_gpu:
        assert_bitwise(broken_run[:7], run[:7])
    assert not broken_run[7:].isfinite().all()
    assert_bitwise(broken_tree[[0, 1, 3]], tree[[0, 1, 3]])
    assert not broken_tree[[2, 4]].isfinite().any()


def test_strided_views_of_fused_tensors(compared_dtype, device) -> None:
    case = case_on(device, entries_of(3, 4), 6, 2, 16, compared_dtype)
    q, plan = batch(case.requests)
    expected = case.op(q, case.k_pool, case.v_pool, plan, 0.25)
    qkv = torch.cat((q, torch.full((len(q), 4, 16), torch.nan, dtype=q.dtype)), dim=1)
    pool = torch.stack((case.k_pool, case.v_pool), dim=1)
    out = case.op(qkv[:, :6], pool[:, 0], pool[:, 1], plan, 0.25)
    assert out.is_contiguous()
    assert_bitwise(out, expected)


def test_padding_rows_are_zero_and_a_batch_may_be_empty(device) -> None:
    case = case_on(device, [Entry(3, 2)], 2, 1, 16)
    for requests in (case.requests, []):
        q, plan = batch(requests, padding=5)
        q = q if requests else torch.full((5, 2, 16), torch.nan)
        out = case.op(q, case.k_pool, case.v_pool, plan, 1.0)
        assert out.shape == q.shape
        assert not out[-5:].any()
        assert out[:-5].isfinite().all()


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    for name, value in (
        ("rows_B", 9), ("starts_B", 1000), ("starts_B", -1), ("run_lens_B", 0), ("q_offsets_B1", 1),
        ("node_slots_N", 10**6), ("node_slots_N", -1), ("node_masks_N", 0b110),
        ("node_masks_N", 0b1011), ("req_to_token", -1),
    ):  # fmt: skip
        case = make_case([Entry(3, 2, [0, 1])])
        q, plan = batch(case.requests)
        getattr(plan, name).view(-1)[0 if name != "req_to_token" else slice(None)] = value
        with pytest.raises(ValueError, match=name):
            native.paged_attention(q, case.k_pool, case.v_pool, plan, 1.0)
