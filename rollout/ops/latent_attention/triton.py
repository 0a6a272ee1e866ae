"""Attention over latents on a GPU, by the work lists and in the order of sums of paged attention
(see `rollout.ops.paged_attention.triton`).

All query heads read one key, so heads are cut into equal blocks of at most 16, which are what kv
heads are to paged attention. A tile is 16 rows, query rows times heads of a block: eight warps have
registers for its sums of 512 dims twice, for a split and for the splits before; 32 rows do not fit.
A block's latents are loaded once, for scores and for sums; the rotated dims, beside them in the
slot, are a product of their own.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rollout.ops.gpu import multiprocessors
from rollout.ops.paged_attention.node_keys import node_keys
from rollout.ops.paged_attention.plan import BLOCK, AttentionPlan
from rollout.ops.paged_attention.triton import add_keys, fold, fold_parts, no_keys
from rollout.ops.paged_attention.work_list import SPLIT_BLOCKS, Limits, list_of_step

ROWS = 16  # of a tile: query rows times the heads of a block
_MAX_PART_BYTES = 128 << 20  # of sums between the two kernels


def latent_attention(
    q_THD: torch.Tensor,
    pool_S1D: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    rotary_dim: int,
) -> torch.Tensor:
    rows, heads, key_dim = q_THD.shape
    latent_dim = key_dim - rotary_dim
    out_THL = q_THD.new_empty(rows, heads, latent_dim)
    if not q_THD.numel():
        return out_THL
    blocks = head_blocks(heads)
    group = triton.next_power_of_2(heads // blocks)
    limits = Limits(
        tile_queries=ROWS // group,
        programs=max(1, multiprocessors(q_THD.device) // blocks),
        part_rows=_MAX_PART_BYTES // (4 * heads * (latent_dim + 2)),
    )
    work, keys = list_of_step(plan, rows, limits), node_keys(plan)
    sizes = work.sizes
    part_rows = max(1, sizes.part_rows)
    sums = q_THD.new_empty((part_rows, heads, latent_dim), dtype=torch.float32)
    weights = q_THD.new_empty((part_rows, heads, 2), dtype=torch.float32)
    latent_block = max(16, triton.next_power_of_2(latent_dim))
    _latent_attention_kernel[(work.programs * blocks,)](
        q_THD, pool_S1D, out_THL, sums, weights, work.items_I6, work.counts_2,
        plan.req_to_token, keys.slots_NW, plan.rows_B, plan.q_offsets_B1, plan.starts_B,
        plan.run_lens_B, plan.node_offsets_B1, keys.lens_N, plan.rows_B.numel(),
        *q_THD.stride()[:2], pool_S1D.stride(0), plan.req_to_token.stride(0),
        heads, blocks, rotary_dim, latent_dim, scale * math.log2(math.e),
        HAS_NODES=len(keys.lens_N) > 0, ROWS=ROWS, GROUP=group,
        ROTARY=max(16, triton.next_power_of_2(rotary_dim)), LATENT=latent_block,
        SPLIT=SPLIT_BLOCKS, BLOCK=BLOCK,
        num_warps=8, num_stages=1 if q_THD.dtype is torch.float32 else 2, enable_fp_fusion=False,
    )  # fmt: skip
    if sizes.folds:
        fold_parts(
            sums, weights, None, out_THL, work,
            kv_heads=blocks, group=group, tile_rows=ROWS,
        )  # fmt: skip
    return out_THL


def head_blocks(heads: int) -> int:
    """The smallest number of equal blocks of at most ROWS heads."""
    blocks = triton.cdiv(heads, ROWS)
    while heads % blocks:
        blocks += 1
    return blocks


@triton.jit
def _attend(q_rotary, q_latent, rotary, latent, visible, top, total, sums, scale):
    """Add one block of keys to the largest score, the sum of weights and the weighted latents."""
    scores = tl.dot(q_rotary, tl.trans(rotary), input_precision="ieee")
    scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision="ieee") * scale
    return add_keys(scores, latent, visible, top, total, sums)


@triton.jit(do_not_specialize=["num_entries"])
def _latent_attention_kernel(
    q_ptr, k_ptr, out_ptr, sums_ptr, weights_ptr, items_ptr, counts_ptr,
    table_ptr, node_slots_ptr, rows_ptr, q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr,
    node_lens_ptr, num_entries,
    q_stride, q_head_stride, k_stride, table_stride,
    heads, blocks, rotary_dim, latent_dim, scale,
    HAS_NODES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, ROTARY: tl.constexpr,
    LATENT: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head_block, num_items = tl.program_id(0) % blocks, tl.load(counts_ptr)
    programs = tl.num_programs(0) // blocks
    for item in range(tl.program_id(0) // blocks, num_items, programs):
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
        group = heads // blocks
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

        rotary_index = tl.arange(0, ROTARY)[None, :]
        latent_index = tl.arange(0, LATENT)[None, :]
        in_rotary, in_latent = rotary_index < rotary_dim, latent_index < latent_dim
        column = tl.arange(0, BLOCK)
        tile_q_ptr = q_ptr + tile_start.to(tl.int64) * q_stride
        tile_q_ptr += head_block * group * q_head_stride
        q_ptrs = tile_q_ptr + query[:, None] * q_stride + head[:, None] * q_head_stride
        q_rotary = tl.load(q_ptrs + rotary_index, mask=is_row[:, None] & in_rotary, other=0.0)
        inside = is_row[:, None] & in_latent
        q_latent = tl.load(q_ptrs + rotary_dim + latent_index, mask=inside, other=0.0)
        latent_ptr = k_ptr + rotary_dim
        table_row = tl.load(rows_ptr + entry, mask=is_entry, other=0).to(tl.int64)
        slots_ptr = table_ptr + table_row * table_stride
        local = query * heads + head  # index in the tile's rows of all heads
        first_part = part_row.to(tl.int64) * heads + head_block * group
        part_sums_ptr = sums_ptr + first_part * latent_dim
        part_weights_ptr = weights_ptr + first_part * 2

        all_top, all_total, all_sums = no_keys(ROWS, LATENT)
        for split in range(first_split, split_end):
            top, total, sums = no_keys(ROWS, LATENT)
            for block in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, end_block)):
                position = block * BLOCK + column
                there = (position < tile_seen)[:, None]
                slot = tl.load(slots_ptr + position, mask=position < tile_seen, other=0).to(
                    tl.int64
                )
                at = slot[:, None] * k_stride
                rotary = tl.load(k_ptr + at + rotary_index, mask=there & in_rotary, other=0.0)
                latent = tl.load(latent_ptr + at + latent_index, mask=there & in_latent, other=0.0)
                visible = position[None, :] < seen[:, None]
                top, total, sums = _attend(
                    q_rotary, q_latent, rotary, latent, visible, top, total, sums, scale
                )
            if HAS_NODES:
                first_own = tl.maximum(own_block, split * SPLIT)
                end_own = tl.minimum(last_block, split * SPLIT + SPLIT)
                for block in range(first_own, end_own):
                    for i in range(first_node, tile_len):
                        node = node_start + first_index + i - run_len
                        own = (block - own_block) * BLOCK + column
                        own_len = tl.load(node_lens_ptr + node)
                        slot_ptrs = node_slots_ptr + node.to(tl.int64) * (2 * BLOCK) + own
                        slot = tl.load(slot_ptrs, mask=own < own_len, other=0).to(tl.int64)
                        there = (own < own_len)[:, None]
                        at = slot[:, None] * k_stride
                        rotary = tl.load(
                            k_ptr + at + rotary_index, mask=there & in_rotary, other=0.0
                        )
                        latent = tl.load(
                            latent_ptr + at + latent_index, mask=there & in_latent, other=0.0
                        )
                        visible = (own < own_len)[None, :] & (query == i)[:, None]
                        # Weights of zero are not enough: zero times infinity is NaN.
                        new_top, new_total, new_sums = _attend(
                            q_rotary, q_latent, rotary, latent, visible, top, total, sums, scale
                        )
                        top = tl.where(query == i, new_top, top)
                        total = tl.where(query == i, new_total, total)
                        sums = tl.where((query == i)[:, None], new_sums, sums)
            if first_split > 0:
                tl.store(
                    part_sums_ptr + (local[:, None] * latent_dim + latent_index), sums, mask=inside
                )
                tl.store(part_weights_ptr + local * 2, top, mask=is_row)
                tl.store(part_weights_ptr + local * 2 + 1, total, mask=is_row)
                part_sums_ptr += tile_len * heads * latent_dim
                part_weights_ptr += tile_len * heads * 2
            else:
                all_top, all_total, all_sums = fold(all_top, all_total, all_sums, top, total, sums)

        if first_split == 0:
            if part_row >= 0:
                tl.store(
                    part_sums_ptr + (local[:, None] * latent_dim + latent_index),
                    all_sums,
                    mask=inside,
                )
                tl.store(part_weights_ptr + local * 2, all_top, mask=is_row)
                tl.store(part_weights_ptr + local * 2 + 1, all_total, mask=is_row)
            else:
                mean = tl.where(is_entry, all_sums / all_total[:, None], 0.0)
                tile_out_ptr = (
                    out_ptr + (tile_start.to(tl.int64) * heads + head_block * group) * latent_dim
                )
                out_ptrs = tile_out_ptr + (local[:, None] * latent_dim + latent_index)
                tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=inside)
