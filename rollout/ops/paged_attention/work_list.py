"""The work list of a step's attention on a GPU: made once per step, read by every layer.

A tile is at most `tile_queries` query rows of one entry. Its keys are split, and an item is a
number of consecutive splits of a tile. As many programs as run at once, per kv head, take items in
turns. An item that is all of its tile writes the output. Tiles with several items are cut: a second
kernel folds their splits. The first item's splits are folded as they come and make one part; each
later split is a part of its own.

The device makes the list, since it knows the lengths of contexts. So a graph that is captured once
serves every step of as many rows, and the levels of a draft's trees, whose plans never are on the
host, have lists too. The host only knows bounds (`list_sizes`), from the shapes of the plan; memory
and grids depend on nothing else.

An item has as many splits as make the list end first: the rounds of its programs times the splits
of an item, and the time of the second kernel if any tile is cut. Lists of more parts than memory
holds, and with more than `_WAVES` items for each program beside those of whole tiles, are left out.
With draft nodes, tiles are halved as long as the halved tiles make at most half as many items as
there are programs, because the nodes of a tile walk their own keys one after another.

Legend: B entries, I items, F tiles that are cut, C candidates for an item's splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollout.ops.entry_lookup import entries_of_tiles
from rollout.ops.paged_attention.plan import BLOCK, AttentionPlan

SPLIT_BLOCKS = 8
_WAVES = 4
_FOLD_QUARTERS = 3
"""The time of the second kernel, in quarters of a split's: by times of an H100 between a third of a
split at one request and a whole one at 32."""


class Limits(NamedTuple):
    """Limits of a device and of a model's heads."""

    tile_queries: int  # query rows of the widest tiles
    programs: int  # programs that run at once, per kv head
    part_rows: int  # query rows of all parts that memory holds


class ListSizes(NamedTuple):
    """Upper bounds of the lists of all steps of given shapes."""

    items: int
    folds: int
    part_rows: int


def list_sizes(plan: AttentionPlan, rows: int, limits: Limits) -> ListSizes:
    """Bounds for plans of these shapes with ``rows`` query rows, padding included."""
    entries, nodes = plan.rows_B.numel(), plan.node_slots_N.numel()
    # A path's nodes follow the run. Padding sees nothing but has an item.
    splits = triton.cdiv(plan.req_to_token.shape[1] + BLOCK - 1, SPLIT_BLOCKS * BLOCK)
    tiles = min(rows, rows // limits.tile_queries + entries + 1)
    items = min(tiles * splits, tiles + _WAVES * limits.programs)
    if nodes:  # tiles are narrower only if that makes few items, beside those of padding
        items = max(items, min(rows * splits, limits.programs // 2 + rows))
    if splits == 1:
        return ListSizes(items, folds=0, part_rows=0)
    return ListSizes(
        items,
        folds=min(items // 2, _WAVES * limits.programs, rows),
        part_rows=min(rows * splits, limits.part_rows),
    )


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """The items and folds of one step. What lies behind the last ones is undefined."""

    rows: int  # query rows, padding included
    limits: Limits
    sizes: ListSizes
    # int32: entry (B: padding rows), first query row, number of query rows, first split, end split,
    # and first row of its parts (-1: it writes the tile's output).
    items_I6: torch.Tensor
    # int32: first query row, number of query rows, first row of the parts, number of parts.
    folds_F4: torch.Tensor
    counts_2: torch.Tensor  # int32: items, folds

    @property
    def programs(self) -> int:
        """Programs per kv head that take the items in turns."""
        return min(self.sizes.items, self.limits.programs)


def list_of_step(plan: AttentionPlan, rows: int, limits: Limits) -> WorkList:
    """The list of a plan for ``rows`` query rows, made at the first layer."""
    if plan.work is None or (plan.work.rows, plan.work.limits) != (rows, limits):
        plan.work = work_list(plan, rows, limits, list_sizes(plan, rows, limits))
    return plan.work


def work_list(plan: AttentionPlan, rows: int, limits: Limits, sizes: ListSizes) -> WorkList:
    """Make the list of a plan. ``sizes``: those of `list_sizes`, or larger ones."""
    like, nodes = plan.q_offsets_B1, plan.node_slots_N.numel()
    items_I6, folds_F4 = like.new_empty((sizes.items, 6)), like.new_empty((sizes.folds, 4))
    counts_2 = like.new_empty(2)
    _work_list_kernel[(1,)](
        plan.q_offsets_B1, plan.starts_B, plan.run_lens_B, plan.node_offsets_B1,
        items_I6, folds_F4, counts_2, plan.rows_B.numel(), rows, sizes.part_rows,
        limits.tile_queries, limits.programs,
        HAS_NODES=nodes > 0, SPLIT=SPLIT_BLOCKS * BLOCK, BLOCK=BLOCK, WAVES=_WAVES,
        FOLD_QUARTERS=_FOLD_QUARTERS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return WorkList(rows, limits, sizes, items_I6, folds_F4, counts_2)


@triton.jit
def _entry(
    q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, entry, num_entries, num_rows
):  # fmt: skip
    """First row, end row, start, run length and draft nodes; entry ``num_entries`` is padding."""
    there = entry < num_entries
    first = tl.load(q_offsets_ptr + entry, mask=entry <= num_entries, other=num_rows)
    end = tl.load(q_offsets_ptr + entry + 1, mask=there, other=num_rows)
    start = tl.load(starts_ptr + entry, mask=there, other=0)
    run_len = tl.load(run_lens_ptr + entry, mask=there, other=0)
    nodes = tl.load(node_offsets_ptr + entry + 1, mask=there, other=0)
    nodes -= tl.load(node_offsets_ptr + entry, mask=there, other=0)
    return first, end, start, run_len, nodes


@triton.jit
def _splits_of_all(
    q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, num_entries, num_rows, queries,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Splits of all tiles of ``queries`` rows, padding aside, as if every row saw the keys of its
    entry's last row."""
    lane = tl.arange(0, 128)
    found = tl.zeros((128,), tl.int32)
    for first_entry in range(0, num_entries, 128):
        first, end, start, run_len, nodes = _entry(
            q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, first_entry + lane,
            num_entries, num_rows,
        )  # fmt: skip
        rows = tl.where(first_entry + lane < num_entries, end - first, 0)
        splits = tl.cdiv(start + run_len + tl.minimum(nodes, BLOCK - 1), SPLIT)
        found += tl.cdiv(rows, queries) * tl.maximum(splits, 1)
    return tl.sum(found)


@triton.jit
def _item_splits(
    q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, num_entries, num_rows, queries,
    programs, max_part_rows,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, WAVES: tl.constexpr, FOLD_QUARTERS: tl.constexpr,
):  # fmt: skip
    """Splits of an item, a power of two, with which the list ends first; of equals the largest."""
    lane = tl.arange(0, 64)
    length = (1 << tl.arange(0, 16))[None, :]  # the largest cuts no tile
    items = tl.zeros((64, 16), tl.int32)
    part_rows = tl.zeros((64, 16), tl.int32)
    most = tl.zeros((64,), tl.int32)
    for first_entry in range(0, num_entries, 64):
        first, end, start, run_len, nodes = _entry(
            q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, first_entry + lane,
            num_entries, num_rows,
        )  # fmt: skip
        rows = tl.where(first_entry + lane < num_entries, end - first, 0)[:, None]
        splits = tl.cdiv(start + run_len + tl.minimum(nodes, BLOCK - 1), SPLIT)
        splits = tl.maximum(splits, 1)[:, None]
        items += tl.cdiv(rows, queries) * tl.cdiv(splits, length)
        part_rows += tl.where(splits > length, rows * (splits - length + 1), 0)
        most = tl.maximum(most, tl.max(tl.where(rows > 0, splits, 0), axis=1))
    items_C, part_rows_C = tl.sum(items, axis=0), tl.sum(part_rows, axis=0)
    longest = tl.max(most)
    candidate_C = tl.arange(0, 16)
    length_C = 1 << candidate_C
    quarters_C = 4 * tl.cdiv(items_C, programs) * tl.minimum(length_C, longest)
    quarters_C += tl.where(length_C < longest, FOLD_QUARTERS, 0)
    fits_C = (part_rows_C <= max_part_rows) & (items_C - tl.min(items_C) <= WAVES * programs)
    quarters_C = tl.where(fits_C, quarters_C, 2**30)
    is_best_C = quarters_C == tl.min(quarters_C)
    return 1 << tl.max(tl.where(is_best_C, candidate_C, 0))


@triton.jit(do_not_specialize=["num_entries", "num_rows", "max_part_rows", "queries", "programs"])
def _work_list_kernel(
    q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, items_ptr, folds_ptr, counts_ptr,
    num_entries, num_rows, max_part_rows, queries, programs,
    HAS_NODES: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, WAVES: tl.constexpr,
    FOLD_QUARTERS: tl.constexpr,
):  # fmt: skip
    if HAS_NODES:
        is_wide = queries > 1
        while is_wide:
            halved = _splits_of_all(
                q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, num_entries, num_rows,
                queries // 2, SPLIT, BLOCK,
            )  # fmt: skip
            is_wide = 2 * halved <= programs
            queries = tl.where(is_wide, queries // 2, queries)
            is_wide = is_wide & (queries > 1)
    length = _item_splits(
        q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, num_entries, num_rows, queries,
        programs, max_part_rows, SPLIT, BLOCK, WAVES, FOLD_QUARTERS,
    )  # fmt: skip

    lane = tl.arange(0, 256)
    items_before, folds_before, rows_before = 0, 0, 0
    for first_tile in range(0, num_rows // queries + num_entries + 1, 256):
        tile = first_tile + lane
        entry = entries_of_tiles(q_offsets_ptr, num_entries, tile, queries)
        first, end, start, run_len, nodes = _entry(
            q_offsets_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, entry, num_entries, num_rows
        )  # fmt: skip
        row = first + (tile - first // queries - entry) * queries
        rows = tl.maximum(tl.minimum(end - row, queries), 0)
        behind = rows - (end - row) + nodes  # nodes up to the tile's last row
        keys = start + run_len + tl.minimum(behind, BLOCK - 1)  # of that row, at most
        splits = tl.maximum(tl.cdiv(tl.maximum(keys, 0), SPLIT), 1)
        items = tl.where(rows > 0, tl.cdiv(splits, length), 0)
        is_cut = items > 1
        parts = tl.where(is_cut, splits - length + 1, 0)
        item = items_before + tl.cumsum(items) - items
        fold = folds_before + tl.cumsum(is_cut.to(tl.int32)) - 1
        part_row = rows_before + tl.cumsum(parts * rows) - parts * rows
        for i in range(0, tl.max(items)):
            item_ptr = items_ptr + (item + i) * 6
            first_split = i * length
            later_row = part_row + tl.maximum(first_split - length + 1, 0) * rows
            tl.store(item_ptr, entry, mask=i < items)
            tl.store(item_ptr + 1, row, mask=i < items)
            tl.store(item_ptr + 2, rows, mask=i < items)
            tl.store(item_ptr + 3, first_split, mask=i < items)
            tl.store(item_ptr + 4, tl.minimum(first_split + length, splits), mask=i < items)
            tl.store(item_ptr + 5, tl.where(is_cut, later_row, -1), mask=i < items)
        tl.store(folds_ptr + fold * 4, row, mask=is_cut)
        tl.store(folds_ptr + fold * 4 + 1, rows, mask=is_cut)
        tl.store(folds_ptr + fold * 4 + 2, part_row, mask=is_cut)
        tl.store(folds_ptr + fold * 4 + 3, parts, mask=is_cut)
        items_before += tl.sum(items)
        folds_before += tl.sum(is_cut.to(tl.int32))
        rows_before += tl.sum(parts * rows)
    tl.store(counts_ptr, items_before)
    tl.store(counts_ptr + 1, folds_before)
