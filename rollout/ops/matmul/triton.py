"""A persistent matrix product on a GPU that adds a row's terms in one order, always.

Every tile shape used for a dtype gives a row the same bits:

- An output is one accumulator that walks the features from first to last. Nothing is split over
  programs or warps along them, so there are no partial sums to add in another order.
- Tensor cores add a whole instruction's products to the accumulator at once, 16 features of them
  for 16-bit numbers, and how they round inside is theirs. What matters is that the instruction
  and its 16 features are the same. On Hopper all tiles are at least 64 rows high and run by whole
  warpgroups, so that all are ``wgmma.m64nNk16``, N being the number of outputs beside ours, and
  the features of one instruction are [16 j, 16 j + 16) whatever BLOCK_K is, a multiple of 16.
- Rows and features that are not there are zeros, and adding zeros changes no sum.
- float32 is multiplied and added feature by feature, without tensor cores.

That N, and the place of a row among the 64, change nothing inside a tensor core is a property
of the hardware: tests marked ``gpu`` compare all tiles, and rollout.layers.row_invariance asks
again when an engine starts.

At few rows the product is bound by reading the weights, and 64 rows of which most are zero take the
tensor cores a third of that time at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout.ops.gpu import multiprocessors

_GROUP = 8  # row tiles that share a tile of weights while it is in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    rows: int
    outputs: int
    features: int
    warps: int
    stages: int
    programs: int  # per multiprocessor


# Each serves up to ``most`` rows; the last any number.
_TILES_16_BIT = (
    (64, Tile(rows=64, outputs=32, features=128, warps=4, stages=4, programs=2)),
    (128, Tile(rows=64, outputs=64, features=64, warps=4, stages=4, programs=3)),
    (512, Tile(rows=64, outputs=128, features=64, warps=4, stages=4, programs=2)),
    (None, Tile(rows=128, outputs=256, features=64, warps=8, stages=3, programs=1)),
)
_TILES_FLOAT32 = ((None, Tile(rows=32, outputs=64, features=32, warps=4, stages=2, programs=2)),)


def tiles(dtype: torch.dtype) -> list[Tile]:
    """All that may serve this dtype."""
    return [tile for _, tile in (_TILES_FLOAT32 if dtype is torch.float32 else _TILES_16_BIT)]


def tile_for(dtype: torch.dtype, rows: int) -> Tile:
    """The fastest for so many rows."""
    choices = _TILES_FLOAT32 if dtype is torch.float32 else _TILES_16_BIT
    return next(tile for most, tile in choices if most is None or rows <= most)


def matmul(
    x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    return tiled_matmul(x_MI, weight_OI, bias_O, tile_for(x_MI.dtype, len(x_MI)))


def tiled_matmul(
    x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    rows, features = x_MI.shape
    outputs = len(weight_OI)
    y_MO = x_MI.new_empty(rows, outputs)
    num_tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    if num_tiles:
        programs = min(num_tiles, multiprocessors(x_MI.device) * tile.programs)
        _matmul_kernel[(programs,)](
            x_MI, weight_OI, bias_O, y_MO,
            rows, outputs, features, x_MI.stride(0), weight_OI.stride(0),
            HAS_BIAS=bias_O is not None, EVEN=features % tile.features == 0,
            ROWS=tile.rows, OUTPUTS=tile.outputs, FEATURES=tile.features, GROUP=_GROUP,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y_MO


@triton.jit
def tile_product(
    x_rows, present, weight_rows, features,
    EVEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Float32 [ROWS, OUTPUTS]: the walk along the features that every product shares.

    x_rows, weight_rows: pointers to first elements, [ROWS, 1] and [OUTPUTS, 1]. Rows of x that are
    not ``present`` ([ROWS, 1]) are zeros.
    """
    feature = tl.arange(0, FEATURES)[None, :]
    x_ptrs = x_rows + feature
    weight_ptrs = weight_rows + feature
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, features, FEATURES):
        if EVEN:
            x = tl.load(x_ptrs, mask=present, other=0.0)
            weight = tl.load(weight_ptrs)
        else:
            here = feature < features - start
            x = tl.load(x_ptrs, mask=present & here, other=0.0)
            weight = tl.load(weight_ptrs, mask=here, other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
        x_ptrs += FEATURES
        weight_ptrs += FEATURES
    return total


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rows, outputs, features, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, ROWS)
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    group_tiles = GROUP * output_tiles
    for tile in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        first = tile // group_tiles * GROUP
        height = min(GROUP, row_tiles - first)
        place = tile % group_tiles
        row = ((first + place % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        output = place // height * OUTPUTS + tl.arange(0, OUTPUTS)
        weight_row = tl.minimum(output, outputs - 1).to(tl.int64)[:, None]  # stays inside
        total = tile_product(
            x_ptr + row * x_stride, row < rows, weight_ptr + weight_row * weight_stride,
            features, EVEN, ROWS, OUTPUTS, FEATURES,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(bias_ptr + output, mask=output < outputs, other=0.0)
            total += bias.to(tl.float32)[None, :]
        inside = (row < rows) & (output[None, :] < outputs)
        y_ptrs = y_ptr + row * outputs + output[None, :]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside)
