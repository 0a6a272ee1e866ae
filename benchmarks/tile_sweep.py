"""Times tiles of the row-invariant matrix product, those in use and others, to find the fastest.

Every shape is timed at the row counts of decoding, of verification and of prefills, with each tile
that fits a multiprocessor. What is printed of a shape is the best, and the time of the one that
`ops.matmul` takes beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.rows import Row, row
from op_case import copies, each, microseconds, normal
from triton import TritonError

from rollout.ops.gpu import multiprocessors
from rollout.ops.matmul.tiles import Tile, make_tile, tile_for, tiles
from rollout.ops.matmul.triton import tiled_matmul

ROWS = (1, 8, 16, 32, 72, 144, 288, 512, 1024, 2304)
HEIGHTS = (16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256, 288)
MAX_PADDING = 1.5
MAX_SUMS = 288 * 128  # of a tile, in the registers of eight warps


def neighbours(rows: int) -> Iterator[Tile]:
    """Tiles of the heights that pad least, with as many stages as fit, eight at most."""
    heights = sorted(HEIGHTS, key=lambda height: (-(-rows // height) * height, -height))[:4]
    for height in heights:
        for outputs in (64, 128, 256):
            for programs in (1, 2):
                for even in (False, True) if outputs == 64 and height <= 96 else (False,):
                    tile = make_tile(height, outputs, programs, even=even)
                    if tile.stages >= 3 and height * outputs <= MAX_SUMS:
                        yield tile


def sweep(linears: Mapping[str, tuple[int, int]]) -> Iterator[Row]:
    """Rows of {name: (outputs, inputs)}."""
    for name, (outputs, inputs) in linears.items():
        num_copies = copies(2 * outputs * inputs)
        weights = [normal(outputs, inputs, device="cuda") for _ in range(num_copies)]
        for rows in ROWS:
            xs = [normal(rows, inputs, device="cuda") for _ in weights]
            used = tile_for(xs[0].dtype, rows, outputs, multiprocessors(xs[0].device))
            times: dict[Tile, float] = {}
            most = MAX_PADDING * max(rows, min(HEIGHTS))
            own = [tile for tile in tiles(xs[0].dtype) if tile.padded_rows(rows) <= most]
            for tile in dict.fromkeys((used, *own, *neighbours(rows))):
                calls = each(lambda x, w, tile=tile: tiled_matmul(x, w, None, tile), xs, weights)
                try:
                    times[tile] = microseconds(calls)
                except (RuntimeError, TritonError) as error:  # it may not fit
                    print(f"{tile}: {error}", flush=True)
            best = min(times, key=times.__getitem__)
            print(f"{name} {rows} rows: {times[best]:.1f} us with {best}", flush=True)
            yield row(f"{name} {rows} rows: best tile", times[best], "us")
            if used in times:
                yield row(f"{name} {rows} rows: tile in use", times[used], "us")
