"""The choice of a product's tile by its rows. Needs neither a GPU nor Triton."""

from __future__ import annotations

import torch

from rollout.config import MemoryConfig
from rollout.ops.matmul.tiles import tile_for, tiles, tiles_up_to
from rollout.runner.graphs import Buckets

PRODUCTS = {"qkv": 6144, "o": 4096, "gate_up": 28_672, "down": 4096, "head": 128_256}  # of 8B
PROCESSORS = 132
BF16 = torch.bfloat16


def test_little_more_is_computed_than_there_is() -> None:
    """The rows of the graph that a step is padded to included."""
    buckets = Buckets(max_rows=MemoryConfig().graph_rows).rows
    for rows in (*range(1, 1025), 2304, 8192):
        padded = next((size for size in buckets if size >= rows), rows)
        for name, outputs in PRODUCTS.items():
            for run in (rows, padded):
                tile = tile_for(BF16, run, outputs, PROCESSORS)
                computed = tile.padding(run) * run / rows
                assert rows <= 64 or computed <= (1.05 if rows > 2000 else 1.5), (name, rows, tile)
                # A second tile of rows reads weights again, where they take the time.
                assert rows > 96 or run > 96 or tile.height >= run, (name, rows, tile)


def test_a_tile_that_is_left_out_is_replaced() -> None:
    for rows in (1, 72, 300):
        first = tile_for(BF16, rows, 4096, PROCESSORS)
        second = tile_for(BF16, rows, 4096, PROCESSORS, {first})
        assert second != first
        assert second in tiles_up_to(BF16, rows, 4096, PROCESSORS, {first})
    last = tiles(BF16)[0]
    assert tile_for(BF16, 2304, 4096, PROCESSORS, set(tiles(BF16)) - {last}) == last
    wide, narrow = tiles(torch.float32)
    assert set(tiles_up_to(torch.float32, 500, 4096, PROCESSORS)) == {wide}
    assert tile_for(torch.float32, 32, 129, PROCESSORS) == narrow  # a router
    assert tile_for(torch.float32, 32, 4096, PROCESSORS, {wide}) == narrow
