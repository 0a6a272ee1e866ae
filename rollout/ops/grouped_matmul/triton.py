"""The grouped matrix product on a GPU: one persistent kernel over (expert, tile).

Tiles and the walk along the features are those of ops.matmul, and so are a row's bits. Only the
device knows how many rows an expert has; programs read it there.
"""

from __future__ import annotations

from collections.abc import Set
from math import ceil, sqrt

import torch
import triton
import triton.language as tl

from rollout.ops.gpu import multiprocessors
from rollout.ops.grouped_matmul.groups import RowGroups
from rollout.ops.matmul.tiles import TWO_BLOCK_TILES, Tile, tile_for
from rollout.ops.matmul.triton import tile_product

_MAX_ROWS = 256
_QUANTILE = 1.28  # standard deviations of a normal distribution's ninth decile


def grouped_matmul(
    x_MI: torch.Tensor,
    weights_NOI: torch.Tensor,
    groups: RowGroups,
    left_out: Set[Tile] = frozenset(),
) -> torch.Tensor:
    num_experts, outputs, _ = weights_NOI.shape
    num_pairs = len(groups.pairs_S)
    # What nine experts of ten have at most where rows choose at random. A power of two: warm-up
    # steps of 1, 2, 4, ... rows then run every tile.
    mean = num_pairs / num_experts
    rows_of_one = min(_MAX_ROWS, triton.next_power_of_2(ceil(mean + _QUANTILE * sqrt(mean))))
    all_outputs = outputs * min(num_experts, num_pairs)
    processors = multiprocessors(x_MI.device)
    unused = TWO_BLOCK_TILES | left_out if left_out else TWO_BLOCK_TILES
    tile = tile_for(x_MI.dtype, rows_of_one, all_outputs, processors, unused)
    return tiled_grouped_matmul(x_MI, weights_NOI, groups, tile)


def tiled_grouped_matmul(
    x_MI: torch.Tensor, weights_NOI: torch.Tensor, groups: RowGroups, tile: Tile
) -> torch.Tensor:
    """`grouped_matmul` with a given tile of one block of rows."""
    assert not tile.more_rows
    num_experts, outputs, features = weights_NOI.shape
    num_pairs = len(groups.pairs_S)
    y_SO = x_MI.new_empty(num_pairs, outputs)
    # Each expert with rows may have one tile that is not full.
    max_tiles = min(num_pairs, num_experts + num_pairs // tile.rows)
    max_tiles *= triton.cdiv(outputs, tile.outputs)
    if max_tiles:
        programs = min(max_tiles, multiprocessors(x_MI.device) * tile.programs)
        _grouped_matmul_kernel[(programs,)](
            x_MI, weights_NOI, groups.pairs_S, groups.offsets_N1, y_SO,
            num_experts, outputs, features, num_pairs // len(x_MI),
            x_MI.stride(0), weights_NOI.stride(0), weights_NOI.stride(1),
            EVEN=features % tile.features == 0, EXPERTS=triton.next_power_of_2(num_experts),
            ROWS=tile.rows, OUTPUTS=tile.outputs, FEATURES=tile.features,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y_SO


@triton.jit
def _grouped_matmul_kernel(
    x_ptr, weight_ptr, pairs_ptr, offsets_ptr, y_ptr,
    num_experts, outputs, features, fan_out, x_stride, expert_stride, weight_stride,
    EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    index = tl.arange(0, EXPERTS)
    starts = tl.load(offsets_ptr + index, mask=index < num_experts, other=0)
    ends = tl.load(offsets_ptr + index + 1, mask=index < num_experts, other=0)
    tiles = (ends - starts + ROWS - 1) // ROWS * output_tiles
    last_tiles = tl.cumsum(tiles, axis=0)
    for tile in range(tl.program_id(0), tl.sum(tiles, axis=0), tl.num_programs(0)):
        expert = tl.sum((last_tiles <= tile).to(tl.int32), axis=0)
        here = index == expert
        start = tl.sum(tl.where(here, starts, 0), axis=0)
        end = tl.sum(tl.where(here, ends, 0), axis=0)
        index_of_expert = tile - tl.sum(tl.where(here, last_tiles - tiles, 0), axis=0)
        height = (end - start + ROWS - 1) // ROWS
        # Row tiles of the same weights are consecutive, while the weights are in the cache.
        number = start + index_of_expert % height * ROWS + tl.arange(0, ROWS)
        present = (number < end)[:, None]
        pair = tl.load(pairs_ptr + number, mask=number < end, other=0)[:, None]
        output = index_of_expert // height * OUTPUTS + tl.arange(0, OUTPUTS)
        weight_row = output.to(tl.int64)[:, None]
        is_output = output < outputs
        x_rows = x_ptr + pair // fan_out * x_stride
        total, _ = tile_product(
            x_rows, present, x_rows, present,
            weight_ptr + expert.to(tl.int64) * expert_stride + weight_row * weight_stride,
            is_output[:, None], features, EVEN, ROWS, 0, OUTPUTS, FEATURES,
        )  # fmt: skip
        y_ptrs = y_ptr + pair * outputs + output[None, :]
        inside = present & is_output[None, :]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside)
