"""Paged attention on a GPU (after FlashAttention, Dao et al. 2022, and Flash-Decoding, 2023).

What a query row computes is fixed by its own keys. They are taken in blocks of 64 at absolute
positions, a block's columns being positions; eight blocks make a split. Within a split the blocks
follow each other with online rescaling, and the splits are folded in order. Whether one program
walks all splits or each has a program of its own and a second kernel folds them, the row sees the
same operations (`_attend`, `_fold`) on the same numbers. A block of which a row sees nothing leaves
it as it is: its weights are exp2(-inf) and its scale is exp2(0).

A tile is 64 rows (of float32 16, if a group of heads is no larger): a few query rows of one entry
times the query heads of one kv head. They share the whole blocks of the context. From there on
draft nodes have keys of their own, at most two blocks: what is left of the context, then the path,
in position order, so that a path sums as plain decoding would. Those blocks are gathered for one
node after another and touch its rows alone. All products, of 64 rows on four warps, are of one
kind: see rollout.ops.matmul.triton.

Probabilities are rounded to the values' dtype before the second product. A token whose values are
not finite may make earlier rows of its run NaN too, those of the same tile; a draft node none.

Legend: as in the op; G query heads per kv head, W columns of a node's own blocks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rollout.ops.entry_lookup import entry_of_row, entry_of_tile
from rollout.ops.gpu import multiprocessors
from rollout.ops.paged_attention.node_keys import BLOCK, node_keys
from rollout.ops.paged_attention.plan import AttentionPlan, NodeKeys

SPLIT_BLOCKS = 8
_NODE_ROWS = 4  # query rows of a tile where there are nodes: theirs come one after another
_WAVES = 2  # programs per multiprocessor from which on splits need none of their own


def paged_attention(
    q_THD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    group = triton.next_power_of_2(q_THD.shape[1] // k_pool_SKD.shape[1])
    tile_queries = tile_rows(q_THD.dtype, group) // group
    if plan.node_slots_N.numel():
        tile_queries = min(tile_queries, _NODE_ROWS)
    programs = _num_tiles(plan, len(q_THD), tile_queries) * k_pool_SKD.shape[1]
    spread = programs < _WAVES * multiprocessors(q_THD.device)
    return tiled_attention(
        q_THD, k_pool_SKD, v_pool_SKD, plan, scale, tile_queries=tile_queries, spread=spread
    )


def most_spread_rows(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> int:
    """Query rows of the largest step whose splits have programs of their own; no draft nodes."""
    group = triton.next_power_of_2(heads // kv_heads)
    most_tiles = triton.cdiv(_WAVES * multiprocessors(device), kv_heads) - 1
    # Of one entry: see `_num_tiles`.
    return max(0, (most_tiles - 1) * (tile_rows(dtype, group) // group) - 1)


def tile_rows(dtype: torch.dtype, group: int) -> int:
    """Query rows times heads. Tensor cores want 64; without them more than 16 fit no registers."""
    return 16 if dtype is torch.float32 and group <= 16 else 64


def _num_tiles(plan: AttentionPlan, rows: int, tile_queries: int) -> int:
    """Entry b's tiles are numbered from q_offsets[b] // tile_queries + b; padding comes last."""
    return rows // tile_queries + plan.rows_B.numel() + 1


def tiled_attention(
    q_THD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    tile_queries: int,
    spread: bool,
) -> torch.Tensor:
    """``spread``: a program per split. No bit depends on that, nor on ``tile_queries``."""
    rows, heads, head_dim = q_THD.shape
    kv_heads = k_pool_SKD.shape[1]
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    if not out_THD.numel():
        return out_THD
    if plan.node_keys is None:
        plan.node_keys = node_keys(plan)
    longest = plan.req_to_token.shape[1] if plan.longest is None else plan.longest
    longest += BLOCK - 1  # nodes of a path
    splits = triton.cdiv(longest, SPLIT_BLOCKS * BLOCK) if spread else 1
    partial, weight = out_THD, out_THD
    if spread:
        partial = q_THD.new_empty((splits, rows, heads, head_dim), dtype=torch.float32)
        weight = q_THD.new_empty((splits, rows, heads, 2), dtype=torch.float32)
    num_entries = plan.rows_B.numel()
    group = triton.next_power_of_2(heads // kv_heads)
    shape = {
        "GROUP": group,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "SPLIT": SPLIT_BLOCKS,
        "BLOCK": BLOCK,
    }
    keys: NodeKeys = plan.node_keys
    where = (
        plan.rows_B, plan.q_offsets_B1, plan.starts_B, plan.run_lens_B, plan.node_offsets_B1,
        keys.lens_N, num_entries, rows,
    )  # fmt: skip
    grid = (_num_tiles(plan, rows, tile_queries), kv_heads, splits)
    _attention_kernel[grid](
        q_THD, k_pool_SKD, v_pool_SKD, out_THD, partial, weight,
        plan.req_to_token, keys.slots_NW, *where,
        *q_THD.stride()[:2], *k_pool_SKD.stride()[:2], *v_pool_SKD.stride()[:2],
        plan.req_to_token.stride(0), heads, kv_heads, head_dim, scale * math.log2(math.e),
        QUERIES=tile_queries, ROWS=tile_rows(q_THD.dtype, group), SPREAD=spread,
        HAS_NODES=len(keys.lens_N) > 0,
        **shape, num_warps=4, num_stages=2 if q_THD.dtype is torch.float32 else 3,
        enable_fp_fusion=False,
    )  # fmt: skip
    if spread:
        _fold_kernel[(rows, kv_heads)](
            partial, weight, out_THD, *where, heads, kv_heads, head_dim,
            **shape, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return out_THD


@triton.jit
def _attend(q, k, v, visible, top, total, sums, scale):
    """One block of keys: the largest score, the sum of weights and the weighted values so far."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * kept + tl.sum(weights, axis=1)
    sums = tl.dot(weights.to(v.dtype), v, sums * kept[:, None], input_precision="ieee")
    return new_top, total, sums


@triton.jit
def _fold(top, total, sums, split_top, split_total, split_sums):
    """A split after those before it."""
    new_top = tl.maximum(top, split_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept, added = tl.exp2(top - base), tl.exp2(split_top - base)
    total = total * kept + split_total * added
    sums = sums * kept[:, None] + split_sums * added[:, None]
    return new_top, total, sums


@triton.jit(do_not_specialize=["num_entries", "num_rows"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, weight_ptr,
    table_ptr, node_slots_ptr, rows_ptr, q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr,
    node_lens_ptr, num_entries, num_rows,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, table_stride,
    heads, kv_heads, head_dim, scale,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, SPREAD: tl.constexpr, HAS_NODES: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    entry = entry_of_tile(q_offsets_ptr, num_entries, tile, QUERIES)
    is_entry = entry < num_entries  # the rows after the last entry's are padding, and see nothing
    entry_start = tl.load(q_offsets_ptr + entry)
    entry_end = tl.load(q_offsets_ptr + entry + 1, mask=is_entry, other=num_rows)
    tile_start = entry_start + (tile - entry_start // QUERIES - entry) * QUERIES
    tile_len = tl.minimum(entry_end - tile_start, QUERIES)
    if tile_len <= 0:
        return
    start = tl.load(starts_ptr + entry, mask=is_entry, other=0)
    run_len = tl.load(run_lens_ptr + entry, mask=is_entry, other=0)
    node_start = tl.load(node_offsets_ptr + entry)
    nodes = tl.load(node_offsets_ptr + entry + 1, mask=is_entry, other=node_start) - node_start
    context = start + run_len
    own_block = context // BLOCK  # the first block of which nodes have a version of their own
    first_place = run_len + nodes - (entry_end - tile_start)  # of the run's rows, then the nodes

    tile_row = tl.arange(0, ROWS)
    query, head = tile_row // GROUP, tile_row % GROUP
    group = heads // kv_heads
    place = first_place + query
    seen = tl.where(place < run_len, start + place + 1, own_block * BLOCK)
    seen = tl.where((query < tile_len) & (head < group), seen, 0)
    tile_seen = tl.max(seen)
    end_block = tl.cdiv(tile_seen, BLOCK)
    first_node = tl.maximum(run_len - first_place, 0)  # the tile's first query that is a node
    last_block = end_block
    if HAS_NODES:
        for i in range(first_node, tile_len):
            node = node_start + first_place + i - run_len
            own_blocks = tl.cdiv(tl.load(node_lens_ptr + node), BLOCK)
            last_block = tl.maximum(last_block, own_block + own_blocks)
    first_split, split_end = 0, tl.cdiv(last_block, SPLIT)
    if SPREAD:
        first_split = tl.program_id(2)
        split_end = tl.minimum(split_end, first_split + 1)
        if first_split >= split_end:
            return

    dim = tl.arange(0, DIM)[None, :]
    column = tl.arange(0, BLOCK)
    inside = (query < tile_len) & (head < group)
    inside = inside[:, None] & (dim < head_dim)
    row = (tile_start + query).to(tl.int64)
    head += kv_head * group
    q_ptrs = q_ptr + row[:, None] * q_stride + head[:, None] * q_head_stride + dim
    q = tl.load(q_ptrs, mask=inside, other=0.0)
    k_ptr += kv_head * k_head_stride + dim
    v_ptr += kv_head * v_head_stride + dim
    table_row = tl.load(rows_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    table_ptr += table_row * table_stride

    all_top = tl.full((ROWS,), float("-inf"), tl.float32)
    all_total = tl.zeros((ROWS,), tl.float32)
    all_sums = tl.zeros((ROWS, DIM), tl.float32)
    top, total, sums = all_top, all_total, all_sums
    for split in range(first_split, split_end):
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, DIM), tl.float32)
        for block in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, end_block)):
            position = block * BLOCK + column
            slot = tl.load(table_ptr + position, mask=position < tile_seen, other=0).to(tl.int64)
            there = (position < tile_seen)[:, None] & (dim < head_dim)
            k = tl.load(k_ptr + slot[:, None] * k_stride, mask=there, other=0.0)
            v = tl.load(v_ptr + slot[:, None] * v_stride, mask=there, other=0.0)
            visible = position[None, :] < seen[:, None]
            top, total, sums = _attend(q, k, v, visible, top, total, sums, scale)
        if HAS_NODES:
            first_own = tl.maximum(own_block, split * SPLIT)
            end_own = tl.minimum(last_block, split * SPLIT + SPLIT)
            for block in range(first_own, end_own):
                for i in range(first_node, tile_len):
                    node = node_start + first_place + i - run_len
                    own = (block - own_block) * BLOCK + column
                    own_len = tl.load(node_lens_ptr + node)
                    slot_ptrs = node_slots_ptr + node.to(tl.int64) * (2 * BLOCK) + own
                    slot = tl.load(slot_ptrs, mask=own < own_len, other=0).to(tl.int64)
                    there = (own < own_len)[:, None] & (dim < head_dim)
                    k = tl.load(k_ptr + slot[:, None] * k_stride, mask=there, other=0.0)
                    v = tl.load(v_ptr + slot[:, None] * v_stride, mask=there, other=0.0)
                    visible = (own < own_len)[None, :] & (query == i)[:, None]
                    # Weights of zero are not enough: zero times infinity is NaN.
                    new_top, new_total, new_sums = _attend(
                        q, k, v, visible, top, total, sums, scale
                    )
                    top = tl.where(query == i, new_top, top)
                    total = tl.where(query == i, new_total, total)
                    sums = tl.where((query == i)[:, None], new_sums, sums)
        if not SPREAD:
            all_top, all_total, all_sums = _fold(all_top, all_total, all_sums, top, total, sums)

    out = row * heads + head
    if SPREAD:
        out += tl.program_id(2).to(tl.int64) * num_rows * heads
        tl.store(partial_ptr + out[:, None] * head_dim + dim, sums, mask=inside)
        is_row = (query < tile_len) & (tile_row % GROUP < group)
        tl.store(weight_ptr + out * 2, top, mask=is_row)
        tl.store(weight_ptr + out * 2 + 1, total, mask=is_row)
    else:
        mean = all_sums / all_total[:, None]
        if entry >= num_entries:
            mean = tl.zeros((ROWS, DIM), tl.float32)
        out_ptrs = out_ptr + out[:, None] * head_dim + dim
        tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_entries", "num_rows"])
def _fold_kernel(
    partial_ptr, weight_ptr, out_ptr, rows_ptr, q_offsets_ptr, starts_ptr, run_lens_ptr,
    node_offsets_ptr, node_lens_ptr, num_entries, num_rows, heads, kv_heads, head_dim,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0), tl.program_id(1)
    entry = entry_of_row(q_offsets_ptr, num_entries, row)
    is_entry = entry < num_entries
    entry_end = tl.load(q_offsets_ptr + entry + 1, mask=is_entry, other=num_rows)
    start = tl.load(starts_ptr + entry, mask=is_entry, other=0)
    run_len = tl.load(run_lens_ptr + entry, mask=is_entry, other=0)
    node_start = tl.load(node_offsets_ptr + entry)
    nodes = tl.load(node_offsets_ptr + entry + 1, mask=is_entry, other=node_start) - node_start
    place = run_len + nodes - (entry_end - row)  # of the run's rows, then the nodes
    node_len_ptr = node_lens_ptr + node_start + place - run_len
    node_len = tl.load(node_len_ptr, mask=place >= run_len, other=0)
    # So many keys are seen; by padding none.
    length = (start + run_len) // BLOCK * BLOCK + node_len
    length = tl.where(place < run_len, start + place + 1, length)

    dim = tl.arange(0, DIM)[None, :]
    group_head = tl.arange(0, GROUP)
    is_head = group_head < heads // kv_heads
    inside = is_head[:, None] & (dim < head_dim)
    head = kv_head * (heads // kv_heads) + group_head
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    sums = tl.zeros((GROUP, DIM), tl.float32)
    for split in range(0, tl.cdiv(length, SPLIT * BLOCK)):
        part = (tl.cast(split, tl.int64) * num_rows + row) * heads + head
        split_sums = tl.load(partial_ptr + part[:, None] * head_dim + dim, mask=inside, other=0.0)
        split_top = tl.load(weight_ptr + part * 2, mask=is_head, other=0.0)
        split_total = tl.load(weight_ptr + part * 2 + 1, mask=is_head, other=0.0)
        top, total, sums = _fold(top, total, sums, split_top, split_total, split_sums)
    mean = sums / total[:, None]
    if entry >= num_entries:
        mean = tl.zeros((GROUP, DIM), tl.float32)
    out = (row.to(tl.int64) * heads + head)[:, None] * head_dim + dim
    tl.store(out_ptr + out, mean.to(out_ptr.dtype.element_ty), mask=inside)
