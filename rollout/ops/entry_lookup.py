"""Finds the entry of a row or tile of a step, in a Triton program.

For one row, each lane reads one offset and they count, block after block: up to 128 entries cost
one load. The number of entries is a run-time argument, so no batch size needs another compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entry_of_row(offsets_ptr, num_entries, row):
    """The b with offsets[b] <= row < offsets[b + 1]; num_entries for rows past the last entry."""
    lane = tl.arange(0, 128)
    ended = tl.zeros((128,), tl.int32)
    for first in range(1, num_entries + 1, 128):
        index = first + lane
        ends = tl.load(offsets_ptr + index, mask=index <= num_entries, other=2**30)
        ended += (ends <= row).to(tl.int32)
    return tl.sum(ended)


@triton.jit
def entries_of_tiles(offsets_ptr, num_entries, tiles, queries):
    """The entry of each tile; entry b has the tiles from offsets[b] // queries + b on.

    There may be at most a million entries.
    """
    found = tl.zeros_like(tiles)
    for bit in tl.static_range(20):
        entry = found + (1 << (19 - bit))
        offset = tl.load(offsets_ptr + entry, mask=entry <= num_entries, other=2**30)
        found = tl.where(offset // queries + entry <= tiles, entry, found)
    return found
