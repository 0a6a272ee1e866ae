"""Tile shapes of the row-invariant matrix product, and which of them a product is given.

Every tile gives a row the same bits (`rollout.ops.matmul.triton` says why), so the choice is one of
time alone. Rows are covered in steps of 16: a block of Triton's is a power of two high, and a tile
may have two of them, as 64 + 16, which share the weights that are read.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache

import torch

ROW_STEP = 16
_FEW_ROWS = 64
_SHARED_BYTES = 227 * 1024  # of a multiprocessor
_MAX_STAGES = 8
_MAX_OF_A_WARPGROUP = 128 * 96  # sums that the registers of four warps hold
_MIN_SHARE = 16  # outputs: two lines of memory where they are written


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    rows: int
    more_rows: int = 0  # a second block of rows below the first
    outputs: int
    features: int
    warps: int
    stages: int
    programs: int  # per multiprocessor
    even: bool = False  # outputs are shared out evenly, and part of each tile may stay empty

    @property
    def height(self) -> int:
        """All rows of a tile."""
        return self.rows + self.more_rows

    def padded_rows(self, rows: int) -> int:
        """Rows that tiles of this kind multiply where there are so many."""
        return _ceil_div(rows, self.height) * self.height

    def share(self, outputs: int, processors: int) -> int:
        """How many outputs of so many a tile is given."""
        if not self.even:
            return self.outputs
        part = _ceil_div(outputs, processors * _MIN_SHARE) * _MIN_SHARE
        return min(self.outputs, max(_MIN_SHARE, part))

    def number(self, rows: int, outputs: int, processors: int) -> int:
        """Tiles of a product."""
        return _ceil_div(rows, self.height) * _ceil_div(outputs, self.share(outputs, processors))

    def padding(self, rows: int, outputs: int, processors: int) -> float:
        """Sums that tiles compute for each of the product's."""
        computed = self.number(rows, outputs, processors) * self.height * self.outputs
        return computed / (rows * outputs)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def make_tile(height: int, outputs: int, programs: int = 1, *, even: bool = False) -> Tile:
    """One or two blocks of rows, and as many stages as fit shared memory."""
    rows = 1 << (height.bit_length() - 1)
    features = 128 if even else 64
    stage = 2 * features * (height + outputs)
    stages = min(_MAX_STAGES, (_SHARED_BYTES // programs - 1024) // stage)
    return Tile(
        rows=rows, more_rows=height - rows, outputs=outputs, features=features,
        warps=4 if height * outputs <= _MAX_OF_A_WARPGROUP else 8,
        stages=stages, programs=programs, even=even,
    )  # fmt: skip


_TILES_16_BIT = (
    *(make_tile(height, 64, even=True) for height in (16, 32)),
    *(make_tile(height, 64) for height in (64, 80, 96, 128, 160)),
    *(make_tile(height, 128, 2) for height in (16, 32, 96)),
    *(make_tile(height, 128) for height in (128, 160, 192, 256)),
    *(make_tile(height, 256) for height in (64, 80, 96, 128, 160)),
)
_TILES_FLOAT32 = (Tile(rows=32, outputs=64, features=32, warps=4, stages=2, programs=2),)
TWO_BLOCK_TILES = frozenset(tile for tile in _TILES_16_BIT if tile.more_rows)

# GB/s, which is bytes in a nanosecond, and FLOP in one. Of the whole GPU divided by its 132
# multiprocessors, as others have more or fewer.
_FROM_MEMORY = 4300 / 132
_FROM_CACHE = 6000 / 132
_INTO_ONE = 80.0
_LATENCY = 1400.0  # ns until weights come, under load
_SHARED = 225.0  # 128 bytes a clock
_FLOP = 790_000 / 132
_MIN_BLOCK = 32  # rows of a product that takes no less time with fewer: weights are read anyway


def feature_ns(tile: Tile, rows: int, outputs: int, processors: int) -> float:
    """Estimated nanoseconds per input feature of a product by five ceilings of a Hopper GPU: its
    memory, its L2 cache, what one multiprocessor takes in with so much on its way, shared memory
    and tensor cores. A last wave that is not full counts whole. Source: docs/gpu.md, which
    has the figures and where they come from.
    """
    share = tile.share(outputs, processors)
    blocks = [tile.rows] + ([tile.more_rows] if tile.more_rows else [])
    num_tiles = tile.number(rows, outputs, processors)
    waves = _ceil_div(num_tiles, processors)  # tiles of the multiprocessor that has most
    read = 2 * (share + min(tile.height, rows))  # bytes of a tile
    on_their_way = min(tile.programs, waves) * (tile.stages - 1) * tile.features * read
    in_shared = 2 * (
        (tile.outputs + tile.height)  # written
        + tile.outputs * len(blocks)  # read for each block
        + tile.height * tile.outputs // 64  # read for each 64 outputs
    )
    multiplied = 2 * tile.outputs * sum(max(_MIN_BLOCK, block) for block in blocks)
    times = (
        2 * outputs / (_FROM_MEMORY * processors),
        num_tiles * read / (_FROM_CACHE * processors),
        waves * read / min(_INTO_ONE, on_their_way / _LATENCY),
        waves * in_shared / _SHARED,
        waves * multiplied / _FLOP,
    )
    return max(times) + sum(times) / 8  # they overlap, but not wholly


def _is_wasteful(tile: Tile, rows: int) -> bool:
    """Whether a third of the rows or more is added to a count that is rounded up to ``rows``. Of
    few rows, where weights take the time, whether they are padded beyond the next power of two."""
    padded = tile.padded_rows(rows)
    if rows <= _FEW_ROWS:
        return padded > 1 << (rows - 1).bit_length()
    return 3 * padded > 4 * (rows - ROW_STEP + 1)


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """All that may serve this dtype."""
    return _TILES_FLOAT32 if dtype is torch.float32 else _TILES_16_BIT


def tile_for(
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    processors: int,
    left_out: Set[Tile] = frozenset(),
) -> Tile:
    """The one estimated to be the fastest of those that waste little, on a GPU of so many
    multiprocessors, but for those ``left_out``. It changes after multiples of ROW_STEP rows only.
    """
    rounded = max(ROW_STEP, _ceil_div(rows, ROW_STEP) * ROW_STEP)
    return _tile_for(dtype, rounded, max(1, outputs), processors, frozenset(left_out))


@lru_cache(maxsize=1 << 14)  # asked for every product that is launched
def _tile_for(
    dtype: torch.dtype, rows: int, outputs: int, processors: int, left_out: frozenset[Tile]
) -> Tile:
    return min(
        (tile for tile in tiles(dtype) if tile not in left_out),
        key=lambda tile: (
            _is_wasteful(tile, rows),
            feature_ns(tile, rows, outputs, processors),
            tile.padded_rows(rows),
        ),
    )


def tiles_up_to(
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    processors: int,
    left_out: Set[Tile] = frozenset(),
) -> dict[Tile, int]:
    """The tiles of products of so many rows or fewer, each with the least number that runs it."""
    found: dict[Tile, int] = {}
    for count in range(1, rows + 1, ROW_STEP):
        found.setdefault(tile_for(dtype, count, outputs, processors, left_out), count)
    return found
