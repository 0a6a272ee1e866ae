"""Which tiles of the row-invariant matrix product are the fastest: those in use, and others.

Every shape is timed at the row counts of decoding, with each tile that fits a multiprocessor. What
is printed of a shape is the best, and the time of the one that `ops.matmul` takes beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpu_case import copies, each, microseconds, normal
from table import Row, row
from triton import TritonError

from rollout.ops.gpu import multiprocessors
from rollout.ops.matmul.triton import Tile, tile_for, tiled_matmul

ROWS = (1, 8, 16, 32, 72)
SHARED_BYTES = 227 * 1024  # of a multiprocessor


def neighbours(rows: int) -> Iterator[Tile]:
    """As many stages as fit, eight at most."""
    height = 1 << (max(rows, 16) - 1).bit_length()
    for tile_rows in (height, height // 2) if height > 32 else (height,):
        for outputs in (64, 128, 256):
            for features in (64, 128):
                for programs in (1, 2, 3):
                    stage = 2 * features * (tile_rows + outputs)
                    stages = min(8, (SHARED_BYTES // programs - 1024) // stage)
                    warps = 8 if tile_rows * outputs > 128 * 64 else 4
                    if stages < 3 or (warps == 8 and programs > 1):
                        continue
                    for even in (False, True) if outputs == 64 and tile_rows <= 32 else (False,):
                        yield Tile(
                            rows=tile_rows, outputs=outputs, features=features, warps=warps,
                            stages=stages, programs=programs, even=even,
                        )  # fmt: skip


def sweep(linears: Mapping[str, tuple[int, int]], device: str = "cuda") -> Iterator[Row]:
    """Rows of {name: (outputs, inputs)}."""
    for name, (outputs, inputs) in linears.items():
        num_copies = copies(2 * outputs * inputs)
        weights = [normal(outputs, inputs, device=device) for _ in range(num_copies)]
        for rows in ROWS:
            xs = [normal(rows, inputs, device=device) for _ in weights]
            used = tile_for(xs[0].dtype, rows, outputs, multiprocessors(xs[0].device))
            times: dict[Tile, float] = {}
            for tile in dict.fromkeys((used, *neighbours(rows))):
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
