"""A persistent matrix product on a GPU that always adds a row's terms in the same order.

Every tile shape used for a dtype gives a row the same bits:

- An output is one accumulator over the features from first to last. Features are not split over
  programs or warps, so there are no partial sums to add in another order.
- Tensor cores add the products of one instruction at once, 16 features of 16-bit numbers, with
  undocumented rounding inside. So the instruction and its 16 features must be the same. On Hopper,
  weights are the 64-high side of all tiles and whole warpgroups run them, so all instructions are
  ``wgmma.m64nNk16``, where N is the number of rows. The features of an instruction are
  [16 j, 16 j + 16) in every tile.
- Missing rows, outputs and features are zeros, and adding zeros changes no sum.
- float32 is multiplied and added feature by feature, without tensor cores.

It is a property of the hardware that N and an output's position among the 64 change nothing inside
a tensor core. Tests marked ``gpu`` compare all tiles, and `rollout.models.layers.row_invariance`
tests them again when an engine starts.

At few rows the product is bound by reading the weights, so they are the 64-high side. With rows on
that side, zeros that fill up 64 rows would take more shared memory and bandwidth than the weights.
A tile may have a second, lower block of rows, so that 80 rows are 64 + 16: one program multiplies
both by weights that it reads once. `rollout.ops.matmul.tiles` has the shapes.
"""

from __future__ import annotations

from collections.abc import Set

import torch
import triton
import triton.language as tl

from rollout.ops.gpu import multiprocessors
from rollout.ops.matmul.tiles import Tile, tile_for

_GROUP = 8  # row tiles that share a tile of weights while it is in the cache


def matmul(
    x_MI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    left_out: Set[Tile] = frozenset(),
) -> torch.Tensor:
    processors = multiprocessors(x_MI.device)
    tile = tile_for(x_MI.dtype, len(x_MI), len(weight_OI), processors, left_out)
    return tiled_matmul(x_MI, weight_OI, bias_O, tile)


def tiled_matmul(
    x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """`matmul` with a given tile."""
    rows, features = x_MI.shape
    outputs = len(weight_OI)
    y_MO = x_MI.new_empty(rows, outputs)
    processors = multiprocessors(x_MI.device)
    share = tile.share(outputs, processors)
    num_tiles = tile.number(rows, outputs, processors)
    if num_tiles:
        _matmul_kernel[(min(num_tiles, processors * tile.programs),)](
            x_MI, weight_OI, bias_O, y_MO,
            rows, outputs, features, share, x_MI.stride(0), weight_OI.stride(0),
            HAS_BIAS=bias_O is not None, EVEN=features % tile.features == 0,
            ROWS=tile.rows, MORE_ROWS=tile.more_rows, OUTPUTS=tile.outputs,
            FEATURES=tile.features, GROUP=_GROUP,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y_MO


@triton.jit
def tile_product(
    x_rows, x_present, x_more_rows, x_more_present, weight_rows, weight_present, features,
    EVEN: tl.constexpr, ROWS: tl.constexpr, MORE_ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """The walk along the features that every product shares.

    Returns float32 [ROWS, OUTPUTS] and [MORE_ROWS, OUTPUTS]; without MORE_ROWS the second is a
    scalar zero. A weight is read once for both.

    x_rows, x_more_rows, weight_rows: pointers to first elements, [ROWS, 1], [MORE_ROWS, 1] and
    [OUTPUTS, 1]. Rows that are not present count as zeros and are not read.
    """
    feature = tl.arange(0, FEATURES)[None, :]
    x_ptrs = x_rows + feature
    weight_ptrs = weight_rows + feature
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    if MORE_ROWS:
        x_more_ptrs = x_more_rows + feature
        more_total = tl.zeros((OUTPUTS, MORE_ROWS), dtype=tl.float32)
    for start in range(0, features, FEATURES):
        here = feature < features - start
        weight_here = weight_present if EVEN else weight_present & here
        x_here = x_present if EVEN else x_present & here
        x = tl.load(x_ptrs, mask=x_here, other=0.0)
        weight = tl.load(weight_ptrs, mask=weight_here, other=0.0)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        if MORE_ROWS:
            x_more_here = x_more_present if EVEN else x_more_present & here
            x_more = tl.load(x_more_ptrs, mask=x_more_here, other=0.0)
            more_total = tl.dot(weight, tl.trans(x_more), more_total, input_precision="ieee")
            x_more_ptrs += FEATURES
        x_ptrs += FEATURES
        weight_ptrs += FEATURES
    if MORE_ROWS:
        return tl.trans(total), tl.trans(more_total)
    else:
        return tl.trans(total), 0.0


@triton.jit
def _store(
    y_ptr, bias_ptr, total, row, rows, output, is_output, outputs, HAS_BIAS: tl.constexpr
):  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + output, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    y_ptrs = y_ptr + row * outputs + output[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(row < rows) & is_output[None, :])


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rows, outputs, features, share, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, MORE_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, ROWS + MORE_ROWS)
    output_tiles = tl.cdiv(outputs, share)
    group_tiles = GROUP * output_tiles
    for tile in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        first = tile // group_tiles * GROUP
        height = min(GROUP, row_tiles - first)
        index_in_group = tile % group_tiles
        first_row = (first + index_in_group % height) * (ROWS + MORE_ROWS)
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        more_row = row
        if MORE_ROWS:
            more_row = (first_row + ROWS + tl.arange(0, MORE_ROWS)).to(tl.int64)[:, None]
        first_output = index_in_group // height * share
        output = first_output + tl.arange(0, OUTPUTS)
        is_output = output < tl.minimum(first_output + share, outputs)
        weight_row = output.to(tl.int64)[:, None]
        total, more_total = tile_product(
            x_ptr + row * x_stride, row < rows, x_ptr + more_row * x_stride, more_row < rows,
            weight_ptr + weight_row * weight_stride, is_output[:, None],
            features, EVEN, ROWS, MORE_ROWS, OUTPUTS, FEATURES,
        )  # fmt: skip
        _store(y_ptr, bias_ptr, total, row, rows, output, is_output, outputs, HAS_BIAS)
        if MORE_ROWS:
            _store(
                y_ptr, bias_ptr, more_total, more_row, rows, output, is_output, outputs, HAS_BIAS
            )
