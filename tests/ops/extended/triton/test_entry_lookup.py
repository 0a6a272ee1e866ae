"""Programs find the entry of their row or tile, of few entries and of more than one block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from rollout.ops.entry_lookup import entries_of_tiles, entry_of_row


@triton.jit
def _lookup_kernel(
    offsets_ptr, num_entries, index_ptr, num_indices, rows_ptr, tiles_ptr, tile_rows
):
    for i in range(0, num_indices):
        index = tl.load(index_ptr + i)
        tl.store(rows_ptr + i, entry_of_row(offsets_ptr, num_entries, index))
    lane = tl.arange(0, 64)
    tiles = tl.load(index_ptr + lane, mask=lane < num_indices, other=0)
    found = entries_of_tiles(offsets_ptr, num_entries, tiles, tile_rows)
    tl.store(tiles_ptr + lane, found, mask=lane < num_indices)


@pytest.mark.parametrize(
    ("entries", "tile_rows"), [(0, 1), (1, 4), (127, 1), (128, 4), (129, 4), (300, 1)]
)
def test_rows_and_tiles_find_their_entry(device, entries, tile_rows) -> None:
    """On both sides of where the first and last entries begin, and those at the ends of blocks."""
    lengths = np.random.default_rng(entries).integers(0, 3, entries)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    first_tiles = offsets // tile_rows + np.arange(entries + 1)
    asked = {0, 1, 126, 127, 128, 129, 255, 256, entries - 1, entries} & set(range(entries + 1))
    begins = np.concatenate([each[sorted(asked)] for each in (offsets, first_tiles)])
    index = np.unique(begins[:, None] + [-1, 0, 1, 3]).clip(0).astype(np.int32)
    padded = torch.from_numpy(np.append(offsets, -1)).to(device)  # -1: not looked at
    rows, tiles = torch.empty(2, len(index), dtype=torch.int32, device=device)
    assert len(index) <= 64
    _lookup_kernel[(1,)](
        padded, entries, torch.from_numpy(index).to(device), len(index), rows, tiles, tile_rows
    )
    assert rows.tolist() == np.searchsorted(offsets[1:], index, side="right").tolist()
    assert tiles.tolist() == np.searchsorted(first_tiles[1:], index, side="right").tolist()
