"""Programs find the entry of their row or tile, of few entries and of more than one block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from rollout.ops.entry_lookup import entry_of_row, entry_of_tile


@triton.jit
def _lookup_kernel(offsets_ptr, num_entries, rows_ptr, tiles_ptr, ROWS: tl.constexpr):
    index = tl.program_id(0)
    tl.store(rows_ptr + index, entry_of_row(offsets_ptr, num_entries, index))
    tl.store(tiles_ptr + index, entry_of_tile(offsets_ptr, num_entries, index, ROWS))


@pytest.mark.parametrize("entries", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize("tile_rows", [1, 4])
def test_rows_and_tiles_find_their_entry(device, entries, tile_rows) -> None:
    lengths = np.random.default_rng(entries).integers(0, 3, entries)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    count = int(offsets[-1]) + entries + 3
    padded = torch.from_numpy(np.append(offsets, -1)).to(device)  # -1: not looked at
    rows, tiles = torch.empty(2, count, dtype=torch.int32, device=device)
    _lookup_kernel[(count,)](padded, entries, rows, tiles, ROWS=tile_rows)
    index = np.arange(count)
    first_tiles = offsets[1:] // tile_rows + np.arange(1, entries + 1)
    assert rows.tolist() == np.searchsorted(offsets[1:], index, side="right").tolist()
    assert tiles.tolist() == np.searchsorted(first_tiles, index, side="right").tolist()
