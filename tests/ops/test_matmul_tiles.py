"""The choice of a product's tile by its rows. Needs neither a GPU nor Triton."""

from __future__ import annotations

import pytest
import torch

from rollout.config import MemoryConfig
from rollout.ops.matmul.tiles import feature_ns, make_tile, tile_for, tiles, tiles_up_to
from rollout.runner.graphs import Buckets

PRODUCTS = {"qkv": 6144, "o": 4096, "gate_up": 28_672, "down": 4096, "head": 128_256}  # of 8B
PROCESSORS = 132
MAX_PADDING = 1.5
BF16 = torch.bfloat16


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_little_more_is_computed_than_there_is(name: str, captured: bool) -> None:
    """The rows of the graph that a step is padded to included."""
    outputs = PRODUCTS[name]
    buckets = Buckets(max_rows=MemoryConfig().graph_rows, max_context_len=1).rows
    table = {}
    for rows in range(1, 1025):
        padded = next(size for size in buckets if size >= rows) if captured else rows
        tile = tile_for(BF16, padded, outputs, PROCESSORS)
        computed = tile.padding(padded) * padded / rows
        table[rows] = f"{computed:.3f} with {tile.height} x {tile.outputs}"
        if rows > 64 and computed > MAX_PADDING:
            pytest.fail("\n".join(f"{rows} rows: {entry}" for rows, entry in table.items()))


def test_large_products_are_hardly_padded() -> None:
    for rows in (2048, 2304, 8192):
        for name, outputs in PRODUCTS.items():
            tile = tile_for(BF16, rows, outputs, PROCESSORS)
            assert tile.padding(rows) < 1.05, (rows, name, tile)


def test_weights_are_read_once_where_they_take_the_time() -> None:
    """A second tile of rows reads them again."""
    for name, outputs in PRODUCTS.items():
        for rows in range(1, 97):
            assert tile_for(BF16, rows, outputs, PROCESSORS).height >= rows, (rows, name)


def test_few_rows_are_shared_out_over_the_whole_gpu() -> None:
    for outputs in (4096, 6144):
        for rows in (1, 16, 17, 32):
            tile = tile_for(BF16, rows, outputs, PROCESSORS)
            assert tile.even
            assert tile.share(outputs, PROCESSORS) % 16 == 0
            assert 0.9 < tile.number(rows, outputs, PROCESSORS) / PROCESSORS <= 1


def test_the_choice_is_the_quickest_by_the_estimate() -> None:
    for rows in (144, 512, 2304):
        for outputs in PRODUCTS.values():
            tile = tile_for(BF16, rows, outputs, PROCESSORS)
            others = [
                feature_ns(other, rows, outputs, PROCESSORS)
                for other in tiles(BF16)
                if other.padded_rows(rows) <= tile.padded_rows(rows)
            ]
            assert feature_ns(tile, rows, outputs, PROCESSORS) == min(others)


def test_an_estimate_follows_what_binds() -> None:
    tile = make_tile(128, 128)
    few, full, more = (feature_ns(tile, 128, 128 * n, PROCESSORS) for n in (1, 132, 133))
    assert few < full
    assert more > 1.2 * full, "one more tile is a wave more"
    # 28672 outputs at 2304 rows: no less than the tensor cores need at their full rate.
    quickest = min(feature_ns(tile, 2304, 28_672, PROCESSORS) for tile in tiles(BF16))
    assert 1 < quickest / (2 * 2304 * 28_672 / 790_000) < 2


def test_a_tile_that_is_left_out_is_replaced() -> None:
    for rows in (1, 72, 300):
        first = tile_for(BF16, rows, 4096, PROCESSORS)
        second = tile_for(BF16, rows, 4096, PROCESSORS, {first})
        assert second != first
        assert second in tiles_up_to(BF16, rows, 4096, PROCESSORS, {first})
    last = tiles(BF16)[0]
    assert tile_for(BF16, 2304, 4096, PROCESSORS, set(tiles(BF16)) - {last}) == last
    assert set(tiles_up_to(torch.float32, 500, 4096, PROCESSORS)) == set(tiles(torch.float32))
