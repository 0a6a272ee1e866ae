"""Tile shapes of the row-invariant matrix product, and the choice among them.

Every tile gives a row the same bits (see `rollout.ops.matmul.triton`), so the choice affects only
time. Heights are multiples of 16: the height of a Triton block is a power of two, and a tile may
have two blocks, such as 64 + 16, that share the weights they read.
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
_MAX_OF_A_WARPGROUP = 128 * 64  # sums of a tile above which eight warps are quicker than four
_MIN_SHARE = 16  # outputs of a tile: 32 bytes of a written row


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The shape of a tile and of the kernel that computes it."""

    rows: int
    more_rows: int = 0  # a second block of rows below the first
    outputs: int
    features: int
    warps: int
    stages: int
    programs: int  # per multiprocessor
    even: bool = False  # outputs are split evenly over programs; part of a tile may stay empty

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return self.rows + self.more_rows

    def padded_rows(self, rows: int) -> int:
        """Rows that tiles of this shape compute for ``rows`` rows."""
        return _ceil_div(rows, self.height) * self.height

    def share(self, outputs: int, processors: int) -> int:
        """Outputs that a tile gets, of ``outputs`` in all."""
        if not self.even:
            return self.outputs
        part = _ceil_div(outputs, processors * _MIN_SHARE) * _MIN_SHARE
        return min(self.outputs, max(_MIN_SHARE, part))

    def number(self, rows: int, outputs: int, processors: int) -> int:
        """The number of tiles of a product."""
        return _ceil_div(rows, self.height) * _ceil_div(outputs, self.share(outputs, processors))

    def padding(self, rows: int) -> float:
        """Computed rows over needed rows, at least 1."""
        return self.padded_rows(rows) / rows


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def make_tile(height: int, outputs: int, programs: int = 1, *, even: bool = False) -> Tile:
    """A tile with one or two blocks of rows, and as many stages as shared memory holds."""
    rows = 1 << (height.bit_length() - 1)
    features = 128 if even else 64
    stage = 2 * features * (height + outputs)
    stages = min(_MAX_STAGES, (_SHARED_BYTES // programs - 1024) // stage)
    return Tile(
        rows=rows, more_rows=height - rows, outputs=outputs, features=features,
        warps=4 if height * outputs <= _MAX_OF_A_WARPGROUP else 8,
        stages=stages, programs=programs, even=even,
    )  # fmt: skip


_NARROW, _FEW_OUTPUTS = 16, 1024  # a tile of so many outputs is for products of at most so many

_TILES_16_BIT = (
    *(make_tile(height, 64, even=True) for height in (16, 32, 48, 96)),
    make_tile(64, 64, 2, even=True),
    *(make_tile(height, 64, 2) for height in (64, 80, 96)),
    make_tile(96, 128, 2),
    *(make_tile(height, 128) for height in (80, 128, 144, 160, 192, 256, 288)),
    *(make_tile(height, 256) for height in (128, 144, 160)),
)
_TILES_FLOAT32 = (
    Tile(rows=32, outputs=64, features=32, warps=4, stages=2, programs=2),
    # For products of few outputs, such as routers: more programs, and more features under way.
    Tile(rows=16, outputs=_NARROW, features=128, warps=4, stages=3, programs=2),
)
TWO_BLOCK_TILES = frozenset(tile for tile in _TILES_16_BIT if tile.more_rows)

# Bytes and FLOP per nanosecond of one multiprocessor, and how times add up: fitted to 482 products
# that an H100 was timed at, 36 sizes with some 13 tiles each: on average the choice is within 1 %
# of the best.
_FROM_MEMORY = 28.2
_INTO_ONE = 110.0
_LATENCY = 764.0  # ns until a load returns
_SHARED = 309.0
_FLOP = 6510.0
_TWO_BLOCKS = 1.15  # times as long tensor cores take for the outputs of a tile of two blocks
_OVERLAP = 0.18  # share of the other ceilings' times that the largest does not hide


def feature_ns(tile: Tile, rows: int, outputs: int, processors: int) -> float:
    """Estimated nanoseconds per input feature of a product, by four ceilings of a Hopper GPU.

    These are memory, the loads in flight of one multiprocessor, shared memory and tensor cores. A
    last wave that is not full counts whole.
    """
    share = tile.share(outputs, processors)
    num_blocks, slower = (2, _TWO_BLOCKS) if tile.more_rows else (1, 1.0)
    waves = _ceil_div(tile.number(rows, outputs, processors), processors)  # of tiles
    read = 2 * (share + min(tile.height, rows))  # bytes of a tile
    in_flight = min(tile.programs, waves) * (tile.stages - 1) * tile.features * read
    in_shared = 2 * (
        (tile.outputs + tile.height)  # written
        + tile.outputs * num_blocks  # read for each block
        + tile.height * tile.outputs // 64  # read for each 64 outputs
    )
    times = (
        2 * outputs / (_FROM_MEMORY * processors),
        waves * read / min(_INTO_ONE, in_flight / _LATENCY),
        waves * in_shared / _SHARED,
        waves * 2 * tile.outputs * tile.height * slower / _FLOP,
    )
    return max(times) + _OVERLAP * sum(times)


def _is_wasteful(tile: Tile, rows: int) -> bool:
    """Whether a tile pads too much.

    ``rows`` is rounded up to ROW_STEP. Padding may add at most a third to the smallest count that
    rounds to ``rows``; for few rows, where weights take the time, up to the next power of two.
    """
    padded = tile.padded_rows(rows)
    if rows <= _FEW_ROWS:
        return padded > 1 << (rows - 1).bit_length()
    return 3 * padded > 4 * (rows - ROW_STEP + 1)


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """All tiles for this dtype."""
    return _TILES_FLOAT32 if dtype is torch.float32 else _TILES_16_BIT


def tile_for(
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    processors: int,
    left_out: Set[Tile] = frozenset(),
) -> Tile:
    """The tile with the smallest estimated time among those that pad little.

    It changes only after multiples of ROW_STEP rows.

    Args:
        processors: multiprocessors of the GPU.
        left_out: tiles that must not be used.
    """
    rounded = max(ROW_STEP, _ceil_div(rows, ROW_STEP) * ROW_STEP)
    return _tile_for(dtype, rounded, max(1, outputs), processors, frozenset(left_out))


@lru_cache(maxsize=1 << 14)  # called for every launched product
def _tile_for(
    dtype: torch.dtype, rows: int, outputs: int, processors: int, left_out: frozenset[Tile]
) -> Tile:
    return min(
        (tile for tile in tiles(dtype) if tile not in left_out),
        key=lambda tile: (
            tile.outputs == _NARROW and outputs > _FEW_OUTPUTS,
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
    """The tiles of products with up to ``rows`` rows, each with the smallest row count that uses
    it."""
    found: dict[Tile, int] = {}
    for count in range(1, rows + 1, ROW_STEP):
        found.setdefault(tile_for(dtype, count, outputs, processors, left_out), count)
    return found
