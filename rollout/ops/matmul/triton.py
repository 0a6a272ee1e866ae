"""A persistent matrix product on a GPU that adds a row's terms in one order, always.

Every tile shape used for a dtype gives a row the same bits:

- An output is one accumulator that walks the features from first to last. Nothing is split over
  programs or warps along them, so there are no partial sums to add in another order.
- Tensor cores add a whole instruction's products to the accumulator at once, 16 features of them
  for 16-bit numbers, and how they round inside is theirs. What matters is that the instruction
  and its 16 features are the same. On Hopper weights are the 64-high side of all tiles, which are
  run by whole warpgroups, so that all are ``wgmma.m64nNk16``, N being the number of rows beside
  ours, and the features of one instruction are [16 j, 16 j + 16) whatever a tile's features are.
- Rows, outputs and features that are not there are zeros, and adding zeros changes no sum.
- float32 is multiplied and added feature by feature, without tensor cores.

That N changes nothing inside a tensor core, nor the place of an output among the 64, is a property
of the hardware: tests marked ``gpu`` compare all tiles, and rollout.layers.row_invariance asks
again when an engine starts.

At few rows the product is bound by reading the weights. Hence they are the 64-high side: with rows
there, the zeros that fill 64 of them up would take more of shared memory and its bandwidth than
the weights do. docs/decisions.md has the arithmetic behind each tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout.ops.gpu import multiprocessors

_GROUP = 8  # row tiles that share a tile of weights while it is in the cache
_LEAST_SHARE = 16  # outputs: two lines of memory where they are written


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    rows: int
    outputs: int
    features: int
    warps: int
    stages: int
    programs: int  # per multiprocessor
    even: bool = False  # outputs are shared out evenly, and part of each tile may stay empty

    def share(self, outputs: int, processors: int) -> int:
        """How many outputs of so many a tile is given."""
        if not self.even:
            return self.outputs
        part = triton.cdiv(outputs, processors * _LEAST_SHARE) * _LEAST_SHARE
        return min(self.outputs, max(_LEAST_SHARE, part))

    def fills(self, rows: int, outputs: int, processors: int) -> bool:
        """Whether there is a tile for most multiprocessors."""
        tiles = triton.cdiv(rows, self.rows) * triton.cdiv(outputs, self.outputs)
        return 10 * tiles >= 7 * processors


def _tile(rows: int, outputs: int, stages: int, programs: int = 1, *, warps: int = 4) -> Tile:
    return Tile(
        rows=rows, outputs=outputs, features=64, warps=warps, stages=stages, programs=programs
    )


def _even_tile(rows: int, stages: int) -> Tile:
    return Tile(rows=rows, outputs=64, features=128, warps=4, stages=stages, programs=1, even=True)


# Those for up to ``most`` rows, from wide to narrow; the last for any number.
_TILES_16_BIT = (
    (16, (_tile(16, 128, 5, 2), _even_tile(16, 8))),
    (32, (_tile(32, 128, 5, 2), _even_tile(32, 7))),
    (64, (_tile(64, 128, 4, 2), _tile(64, 64, 4, 3))),
    (128, (_tile(128, 256, 4, warps=8), _tile(128, 64, 4, 2), _tile(64, 64, 4, 3))),
    (None, (_tile(256, 128, 3, warps=8), _tile(128, 128, 4, warps=8), _tile(128, 64, 4, 2))),
)
_TILES_FLOAT32 = ((None, (Tile(rows=32, outputs=64, features=32, warps=4, stages=2, programs=2),)),)


def _choices(dtype: torch.dtype) -> tuple[tuple[int | None, tuple[Tile, ...]], ...]:
    return _TILES_FLOAT32 if dtype is torch.float32 else _TILES_16_BIT


def tiles(dtype: torch.dtype) -> list[Tile]:
    """All that may serve this dtype."""
    return list(dict.fromkeys(tile for _, some in _choices(dtype) for tile in some))


def tile_for(dtype: torch.dtype, rows: int, outputs: int, processors: int) -> Tile:
    """The widest that keeps a GPU of so many multiprocessors busy."""
    some = next(some for most, some in _choices(dtype) if most is None or rows <= most)
    return next((tile for tile in some if tile.fills(rows, outputs, processors)), some[-1])


def tiles_up_to(dtype: torch.dtype, rows: int, outputs: int, processors: int) -> list[Tile]:
    """Those that products of so many rows or fewer run. Which it is changes after multiples of 16
    rows only."""
    counts = range(1, rows + 1, 16)
    return list(dict.fromkeys(tile_for(dtype, count, outputs, processors) for count in counts))


def matmul(
    x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    processors = multiprocessors(x_MI.device)
    tile = tile_for(x_MI.dtype, len(x_MI), len(weight_OI), processors)
    return tiled_matmul(x_MI, weight_OI, bias_O, tile)


def tiled_matmul(
    x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    rows, features = x_MI.shape
    outputs = len(weight_OI)
    y_MO = x_MI.new_empty(rows, outputs)
    processors = multiprocessors(x_MI.device)
    share = tile.share(outputs, processors)
    num_tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, share)
    if num_tiles:
        _matmul_kernel[(min(num_tiles, processors * tile.programs),)](
            x_MI, weight_OI, bias_O, y_MO,
            rows, outputs, features, share, x_MI.stride(0), weight_OI.stride(0),
            HAS_BIAS=bias_O is not None, EVEN=features % tile.features == 0,
            ROWS=tile.rows, OUTPUTS=tile.outputs, FEATURES=tile.features, GROUP=_GROUP,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y_MO


@triton.jit
def tile_product(
    x_rows, x_present, weight_rows, weight_present, features,
    EVEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Float32 [ROWS, OUTPUTS]: the walk along the features that every product shares.

    x_rows, weight_rows: pointers to first elements, [ROWS, 1] and [OUTPUTS, 1]. Those that are not
    present are zeros, and nothing is read there.
    """
    feature = tl.arange(0, FEATURES)[None, :]
    x_ptrs = x_rows + feature
    weight_ptrs = weight_rows + feature
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for start in range(0, features, FEATURES):
        if EVEN:
            x = tl.load(x_ptrs, mask=x_present, other=0.0)
            weight = tl.load(weight_ptrs, mask=weight_present, other=0.0)
        else:
            here = feature < features - start
            x = tl.load(x_ptrs, mask=x_present & here, other=0.0)
            weight = tl.load(weight_ptrs, mask=weight_present & here, other=0.0)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        x_ptrs += FEATURES
        weight_ptrs += FEATURES
    return tl.trans(total)


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rows, outputs, features, share, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, ROWS)
    output_tiles = tl.cdiv(outputs, share)
    group_tiles = GROUP * output_tiles
    for tile in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        first = tile // group_tiles * GROUP
        height = min(GROUP, row_tiles - first)
        place = tile % group_tiles
        row = ((first + place % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        first_output = place // height * share
        output = first_output + tl.arange(0, OUTPUTS)
        is_output = output < tl.minimum(first_output + share, outputs)
        weight_row = output.to(tl.int64)[:, None]
        total = tile_product(
            x_ptr + row * x_stride, row < rows,
            weight_ptr + weight_row * weight_stride, is_output[:, None],
            features, EVEN, ROWS, OUTPUTS, FEATURES,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(bias_ptr + output, mask=is_output, other=0.0)
            total += bias.to(tl.float32)[None, :]
        y_ptrs = y_ptr + row * outputs + output[None, :]
        inside = (row < rows) & is_output[None, :]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside)
