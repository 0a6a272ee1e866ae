"""Lists of attention's work and tiles on a GPU: none changes a bit.

Pools are NaN wherever no key of the plan is.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from rollout.ops.paged_attention import PLAIN, AttentionVariant, reference
from rollout.ops.paged_attention.triton import listed_attention, tile_rows
from rollout.ops.paged_attention.work_list import Limits, list_sizes, work_list
from tests.helpers.attention_cases import (
    Entry,
    assert_bitwise,
    batch,
    case_on,
    engine_step,
    random_tree,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

WHOLE = {"programs": 1, "part_rows": 0}  # an item per tile
CUT = {"programs": 4096, "part_rows": 1 << 20}  # per split; tiles of nodes have one row
SOME = {"programs": 7, "part_rows": 1 << 20}  # items of several splits


def listed(variant=PLAIN, **limits):
    """Attention by a list of work within these limits."""

    def op(q, k_pool, v_pool, plan, scale):
        own = Limits(**limits)
        work = work_list(plan, len(q), own, list_sizes(plan, len(q), own))
        return listed_attention(q, k_pool, v_pool, plan, scale, work, variant)

    return op


@pytest.mark.parametrize(
    ("limits", "varied"), [(WHOLE, True), (CUT, False), (SOME, True), (SOME, False)], ids=str
)
def test_contexts_of_several_splits(compared_dtype, device, limits, varied) -> None:
    """One ends at a split's last key, one tree crosses into the next split; a window leaves out the
    first splits, or most of one."""
    variant, on_cpu = (
        AttentionVariant(window=70, soft_cap=1.5, sinks_H=torch.linspace(-2, 3, 4).to(place))
        if varied
        else PLAIN
        for place in (device, "cpu")
    )
    entries = [Entry(1100, 2), Entry(511, 1), Entry(1020, 1, [0, 1, 2, 3, 4, 0])]
    op = listed(variant, tile_queries=4, **limits)
    case = case_on(device, entries, 4, 2, 16, compared_dtype, op=op)
    q, plan = batch(case.requests)
    out = case.op(q, case.k_pool, case.v_pool, plan, 0.25)
    expected = reference.paged_attention(q, case.k_pool, case.v_pool, plan, 0.25, on_cpu)
    tolerance = 5e-6 if q.dtype is torch.float32 else 4 * torch.finfo(q.dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_tiles_and_splits_change_no_bit(compared_dtype, device) -> None:
    """Programs that walk all splits, one or some of them, tiles of one or many rows."""
    entries = [Entry(505, 12), Entry(520, 3, [0, 0, 1, 2]), Entry(600, 1)]
    shape = (4, 1, 64, compared_dtype)
    expected = case_on(device, entries, *shape).run()
    most = tile_rows(compared_dtype, 4) // 4
    for tile_queries in (3, most) if INTERPRETED else (1, 2, 3, most):
        for limits in (WHOLE, CUT, SOME):
            op = listed(tile_queries=tile_queries, **limits)
            for out, wanted in zip(
                case_on(device, entries, *shape, op=op).run(), expected, strict=True
            ):
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
