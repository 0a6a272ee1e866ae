"""Paged attention on a GPU (after FlashAttention, Dao et al. 2022, and Flash-Decoding, 2023).

A query row's computation depends on its own keys alone. Keys are read in blocks of 64 absolute
positions; eight blocks make a split. Within a split, blocks follow each other with online
rescaling; splits are folded in order. One program may walk all splits, or several programs and a
second kernel that folds their results (see `work_list`): the row sees the same operations
(`add_keys`, `fold`) on the same numbers. A block in which a row sees nothing does not change it:
its weights are exp2(-inf) and its scale is exp2(0).

A tile is 64 rows (16 for float32, if a group of heads is no larger): a few query rows of one entry
times the query heads of one kv head. They share the whole blocks of the context. After these, draft
nodes have keys of their own, at most two blocks: the rest of the context, then the path, in
position order, so that a path's sums are those of plain decoding. These blocks are gathered for one
node after another and change only its rows. All products have 64 rows on four warps, or eight
for wide heads, so their instructions are the same: see rollout.ops.matmul.triton.

A window leaves out blocks in which no row of the tile sees a key; splits stay where they are, and
those without a block fold in nothing. A sink's weight comes last.

Probabilities are rounded to the values' dtype before the second product. A token with values that
are not finite may make earlier rows of its run in the same tile NaN too, and later ones whose
windows begin after it; a draft node does not.

Legend: as in the op; G query heads per kv head, W columns of a node's own blocks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rollout.ops.gpu import multiprocessors
from rollout.ops.paged_attention.node_keys import node_keys
from rollout.ops.paged_attention.plan import BLOCK, PLAIN, AttentionPlan, AttentionVariant
from rollout.ops.paged_attention.work_list import (
    SPLIT_BLOCKS,
    Limits,
    WorkList,
    list_of_step,
)
from rollout.ops.tanh import tanh

_LOG2_E = math.log2(math.e)
_MAX_PART_BYTES = 128 << 20  # of sums between the two kernels
_FOLD_NUMBERS = 1024  # of a part, which one program folds


def paged_attention(
    q_THD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> torch.Tensor:
    rows, heads, head_dim = q_THD.shape
    if not q_THD.numel():
        return torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    kv_heads = k_pool_SKD.shape[1]
    group = triton.next_power_of_2(heads // kv_heads)
    limits = Limits(
        tile_queries=tile_rows(q_THD.dtype, group) // group,
        programs=max(1, resident_programs(head_dim) * multiprocessors(q_THD.device) // kv_heads),
        part_rows=_MAX_PART_BYTES // (4 * heads * (head_dim + 2)),
    )
    work = list_of_step(plan, rows, limits)
    return listed_attention(q_THD, k_pool_SKD, v_pool_SKD, plan, scale, work, variant)


def program_warps(head_dim: int) -> int:
    """Warps of a program: four spill 2 KiB a thread where heads are wide, eight 0.4 KiB."""
    return 4 if head_dim <= 128 else 8


def resident_programs(head_dim: int) -> int:
    """Programs of a multiprocessor that run at once, by their registers and shared memory."""
    return 2 if head_dim <= 128 else 1


def tile_rows(dtype: torch.dtype, group: int) -> int:
    """Rows of a tile, query rows times heads: 64 for tensor cores, else 16 to fit registers."""
    return 16 if dtype is torch.float32 and group <= 16 else 64


def listed_attention(
    q_THD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    work: WorkList,
    variant: AttentionVariant = PLAIN,
) -> torch.Tensor:
    """Attention by a given work list, whose tiles must have at most `tile_rows` rows.

    The list does not change a bit of the result.
    """
    heads, head_dim = q_THD.shape[1:]
    kv_heads = k_pool_SKD.shape[1]
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    keys, sizes = node_keys(plan), work.sizes
    part_rows = max(1, sizes.part_rows)
    sums = q_THD.new_empty((part_rows, heads, head_dim), dtype=torch.float32)
    weights = q_THD.new_empty((part_rows, heads, 2), dtype=torch.float32)
    group = triton.next_power_of_2(heads // kv_heads)
    shape = {
        "ROWS": tile_rows(q_THD.dtype, group),
        "GROUP": group,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "HAS_SINKS": variant.sinks_H is not None,
    }
    sinks = weights if variant.sinks_H is None else variant.sinks_H
    cap = variant.soft_cap
    # Scores are in units of log 2, or of the cap until they have gone through tanh.
    scale = scale * _LOG2_E if cap is None else scale / cap
    _attention_kernel[(work.programs * kv_heads,)](
        q_THD, k_pool_SKD, v_pool_SKD, out_THD, sums, weights, sinks, work.items_I6, work.counts_2,
        plan.req_to_token, keys.slots_NW, plan.rows_B, plan.q_offsets_B1, plan.starts_B,
        plan.run_lens_B, plan.node_offsets_B1, keys.lens_N, plan.rows_B.numel(),
        *q_THD.stride()[:2], *k_pool_SKD.stride()[:2], *v_pool_SKD.stride()[:2],
        plan.req_to_token.stride(0), heads, kv_heads, head_dim, scale,
        0.0 if cap is None else cap * _LOG2_E, variant.window or 0, HAS_NODES=len(keys.lens_N) > 0,
        HAS_WINDOW=variant.window is not None, HAS_CAP=cap is not None, **shape,
        SPLIT=SPLIT_BLOCKS, BLOCK=BLOCK,
        num_warps=program_warps(head_dim), num_stages=2 if q_THD.dtype is torch.float32 else 3,
        enable_fp_fusion=False,
    )  # fmt: skip
    if sizes.folds:
        fold_parts(
            sums, weights, variant.sinks_H, out_THD, work,
            kv_heads=kv_heads, group=group, tile_rows=shape["ROWS"],
        )  # fmt: skip
    return out_THD


def fold_parts(
    sums: torch.Tensor,
    weights: torch.Tensor,
    sinks_H: torch.Tensor | None,
    out_THD: torch.Tensor,
    work: WorkList,
    *,
    kv_heads: int,
    group: int,
    tile_rows: int,
) -> None:
    """Fold the parts of all tiles that are cut. ``tile_rows``: rows of a tile, at most."""
    heads, head_dim = out_THD.shape[1:]
    dim = max(16, triton.next_power_of_2(head_dim))
    rows = max(1, _FOLD_NUMBERS // dim)
    chunks = triton.cdiv(min(tile_rows, len(out_THD) * group), rows)
    _fold_kernel[(work.sizes.folds * kv_heads * chunks,)](
        sums, weights, weights if sinks_H is None else sinks_H, out_THD, work.folds_F4,
        work.counts_2, heads, kv_heads, head_dim, chunks,
        HAS_SINKS=sinks_H is not None, ROWS=rows, GROUP=group, DIM=dim,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _attend(q, k, v, visible, top, total, sums, scale, cap, HAS_CAP: tl.constexpr):
    """Add one block of keys to the largest score, the sum of weights and the weighted values."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:
        scores = cap * tanh(scores)
    return add_keys(scores, v, visible, top, total, sums)


@triton.jit
def no_keys(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The largest score, the sum of weights and the weighted values of no keys."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIM), tl.float32)


@triton.jit
def add_keys(scores, v, visible, top, total, sums):
    """Add keys with these scores and values to `no_keys` or the keys before."""
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * rescale + tl.sum(weights, axis=1)
    sums = tl.dot(weights.to(v.dtype), v, sums * rescale[:, None], input_precision="ieee")
    return new_top, total, sums


@triton.jit
def fold(top, total, sums, split_top, split_total, split_sums):
    """Add a split to the splits before it."""
    new_top = tl.maximum(top, split_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale, added = tl.exp2(top - base), tl.exp2(split_top - base)
    total = total * rescale + split_total * added
    sums = sums * rescale[:, None] + split_sums * added[:, None]
    return new_top, total, sums


@triton.jit
def _mean(top, total, sums, sinks_ptr, head, is_row, HAS_SINKS: tl.constexpr):
    """The weighted mean of values, to whose weights a sink adds its own."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.exp2(sink - new_top)
        sums = sums * rescale[:, None]
    return sums / total[:, None]


@triton.jit(do_not_specialize=["num_entries", "window"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sums_ptr, weights_ptr, sinks_ptr, items_ptr, counts_ptr,
    table_ptr, node_slots_ptr, rows_ptr, q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr,
    node_lens_ptr, num_entries,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, table_stride,
    heads, kv_heads, head_dim, scale, cap, window,
    HAS_NODES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    kv_head, num_items = tl.program_id(0) % kv_heads, tl.load(counts_ptr)
    programs = tl.num_programs(0) // kv_heads
    for item in range(tl.program_id(0) // kv_heads, num_items, programs):
        item_ptr = items_ptr + item * 6
        tile_len = tl.load(item_ptr + 2)
        entry, tile_start = tl.load(item_ptr), tl.load(item_ptr + 1)
        first_split, split_end = tl.load(item_ptr + 3), tl.load(item_ptr + 4)
        part_row = tl.load(item_ptr + 5)
        is_entry = entry < num_entries  # rows after the last entry are padding and see nothing
        entry_end = tl.load(q_offsets_ptr + entry + 1, mask=is_entry, other=tile_start)
        start = tl.load(starts_ptr + entry, mask=is_entry, other=0)
        run_len = tl.load(run_lens_ptr + entry, mask=is_entry, other=0)
        node_start = tl.load(node_offsets_ptr + entry)
        nodes = tl.load(node_offsets_ptr + entry + 1, mask=is_entry, other=node_start) - node_start
        own_block = (start + run_len) // BLOCK  # the first block with nodes' own keys
        # Index of the tile's first row among the entry's run rows and nodes.
        first_index = run_len + nodes - (entry_end - tile_start)

        tile_row = tl.arange(0, ROWS)
        query, head = tile_row // GROUP, tile_row % GROUP
        group = heads // kv_heads
        index = first_index + query
        is_row = (query < tile_len) & (head < group)
        seen = tl.where(index < run_len, start + index + 1, own_block * BLOCK)
        seen = tl.where(is_row, seen, 0)
        tile_seen = tl.max(seen)
        end_block = tl.cdiv(tile_seen, BLOCK)
        first_node = tl.maximum(run_len - first_index, 0)  # the tile's first query that is a node
        last_block = end_block
        if HAS_NODES:
            is_node = (index >= run_len) & (index < run_len + nodes) & (query < tile_len)
            node_lens = tl.load(node_lens_ptr + node_start + index - run_len, mask=is_node, other=0)
            last_block = tl.maximum(last_block, own_block + tl.cdiv(tl.max(node_lens), BLOCK))
        first_block, tile_first = 0, 0
        if HAS_WINDOW:
            length = start + index + 1
            if HAS_NODES:
                length = tl.where(is_node, own_block * BLOCK + node_lens, length)
            first_seen = tl.maximum(length - window, 0)
            tile_first = tl.min(tl.where(is_row, first_seen, tile_seen))
            first_block = tile_first // BLOCK

        dim = tl.arange(0, DIM)[None, :]
        column = tl.arange(0, BLOCK)
        inside = is_row[:, None] & (dim < head_dim)
        tile_q_ptr = q_ptr + tile_start.to(tl.int64) * q_stride
        tile_q_ptr += kv_head * group * q_head_stride
        q_ptrs = tile_q_ptr + query[:, None] * q_stride + head[:, None] * q_head_stride + dim
        q = tl.load(q_ptrs, mask=inside, other=0.0)
        keys_ptr = k_ptr + kv_head * k_head_stride + dim
        values_ptr = v_ptr + kv_head * v_head_stride + dim
        table_row = tl.load(rows_ptr + entry, mask=is_entry, other=0).to(tl.int64)
        slots_ptr = table_ptr + table_row * table_stride
        local = query * heads + head  # index in the tile's rows of all heads
        first_part = part_row.to(tl.int64) * heads + kv_head * group
        part_sums_ptr = sums_ptr + first_part * head_dim
        part_weights_ptr = weights_ptr + first_part * 2

        all_top, all_total, all_sums = no_keys(ROWS, DIM)
        for split in range(first_split, split_end):
            top, total, sums = no_keys(ROWS, DIM)
            split_end_block = tl.minimum(split * SPLIT + SPLIT, end_block)
            begin_block = tl.maximum(split * SPLIT, first_block)
            begin = begin_block * BLOCK + column
            next_slot = tl.load(slots_ptr + begin, mask=begin < tile_seen, other=0)
            for block in range(begin_block, split_end_block):
                position = block * BLOCK + column
                in_context = position < tile_seen
                if HAS_WINDOW:
                    in_context &= position >= tile_first
                slot = next_slot.to(tl.int64)
                next_slot = tl.load(
                    slots_ptr + position + BLOCK, mask=position + BLOCK < tile_seen, other=0
                )
                there = in_context[:, None] & (dim < head_dim)
                k = tl.load(keys_ptr + slot[:, None] * k_stride, mask=there, other=0.0)
                v = tl.load(values_ptr + slot[:, None] * v_stride, mask=there, other=0.0)
                visible = position[None, :] < seen[:, None]
                if HAS_WINDOW:
                    visible &= position[None, :] >= first_seen[:, None]
                top, total, sums = _attend(q, k, v, visible, top, total, sums, scale, cap, HAS_CAP)
            if HAS_NODES:
                first_own = tl.maximum(own_block, split * SPLIT)
                end_own = tl.minimum(last_block, split * SPLIT + SPLIT)
                for block in range(first_own, end_own):
                    own = (block - own_block) * BLOCK + column
                    node = node_start + first_index + first_node - run_len
                    next_len = tl.load(node_lens_ptr + node, mask=first_node < tile_len, other=0)
                    next_slot = tl.load(
                        node_slots_ptr + node.to(tl.int64) * (2 * BLOCK) + own,
                        mask=own < next_len,
                        other=0,
                    )
                    for i in range(first_node, tile_len):
                        own_len, slot = next_len, next_slot.to(tl.int64)
                        node += 1
                        next_len = tl.load(node_lens_ptr + node, mask=i + 1 < tile_len, other=0)
                        next_slot = tl.load(
                            node_slots_ptr + node.to(tl.int64) * (2 * BLOCK) + own,
                            mask=own < next_len,
                            other=0,
                        )
                        is_own = own < own_len
                        if HAS_WINDOW:
                            is_own &= own >= own_len - window
                        there = is_own[:, None] & (dim < head_dim)
                        k = tl.load(keys_ptr + slot[:, None] * k_stride, mask=there, other=0.0)
                        v = tl.load(values_ptr + slot[:, None] * v_stride, mask=there, other=0.0)
                        visible = is_own[None, :] & (query == i)[:, None]
                        # Weights of zero are not enough: zero times infinity is NaN.
                        new_top, new_total, new_sums = _attend(
                            q, k, v, visible, top, total, sums, scale, cap, HAS_CAP
                        )
                        top = tl.where(query == i, new_top, top)
                        total = tl.where(query == i, new_total, total)
                        sums = tl.where((query == i)[:, None], new_sums, sums)
            if first_split > 0:
                tl.store(part_sums_ptr + (local[:, None] * head_dim + dim), sums, mask=inside)
                tl.store(part_weights_ptr + local * 2, top, mask=is_row)
                tl.store(part_weights_ptr + local * 2 + 1, total, mask=is_row)
                part_sums_ptr += tile_len * heads * head_dim
                part_weights_ptr += tile_len * heads * 2
            else:
                all_top, all_total, all_sums = fold(all_top, all_total, all_sums, top, total, sums)

        if first_split == 0:
            if part_row >= 0:
                tl.store(part_sums_ptr + (local[:, None] * head_dim + dim), all_sums, mask=inside)
                tl.store(part_weights_ptr + local * 2, all_top, mask=is_row)
                tl.store(part_weights_ptr + local * 2 + 1, all_total, mask=is_row)
            else:
                of_all = kv_head * group + head
                mean = _mean(all_top, all_total, all_sums, sinks_ptr, of_all, is_row, HAS_SINKS)
                mean = tl.where(is_entry, mean, 0.0)
                tile_out_ptr = (
                    out_ptr + (tile_start.to(tl.int64) * heads + kv_head * group) * head_dim
                )
                out_ptrs = tile_out_ptr + (local[:, None] * head_dim + dim)
                tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["chunks"])
def _fold_kernel(
    sums_ptr, weights_ptr, sinks_ptr, out_ptr, folds_ptr, counts_ptr, heads, kv_heads, head_dim,
    chunks, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    chunk, program = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    if program // kv_heads >= tl.load(counts_ptr + 1):
        return
    fold_ptr, kv_head = folds_ptr + program // kv_heads * 4, program % kv_heads
    tile_len = tl.load(fold_ptr + 1)
    if chunk * ROWS // GROUP >= tile_len:
        return
    tile_start, part_row, parts = tl.load(fold_ptr), tl.load(fold_ptr + 2), tl.load(fold_ptr + 3)
    tile_row = chunk * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)[None, :]
    query, head = tile_row // GROUP, tile_row % GROUP
    group = heads // kv_heads
    is_row = (query < tile_len) & (head < group)
    inside = is_row[:, None] & (dim < head_dim)
    head += kv_head * group
    part = (part_row + query).to(tl.int64) * heads + head
    top, total, sums = no_keys(ROWS, DIM)
    for _ in tl.range(0, parts, num_stages=6):  # five parts are loading while one is folded
        part_sums = tl.load(sums_ptr + part[:, None] * head_dim + dim, mask=inside, other=0.0)
        part_top = tl.load(weights_ptr + part * 2, mask=is_row, other=0.0)
        part_total = tl.load(weights_ptr + part * 2 + 1, mask=is_row, other=0.0)
        top, total, sums = fold(top, total, sums, part_top, part_total, part_sums)
        part += tile_len.to(tl.int64) * heads
    mean = _mean(top, total, sums, sinks_ptr, head, is_row, HAS_SINKS)
    out = ((tile_start + query).to(tl.int64) * heads + head)[:, None] * head_dim + dim
    tl.store(out_ptr + out, mean.to(out_ptr.dtype.element_ty), mask=inside)
