"""Which entry a row or tile of a step belongs to, as a GPU's programs find it.

All lanes read one offset each and count, block after block: up to 128 entries cost one load. The
number of entries is a run-time one, so a batch of another size compiles nothing anew.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entry_of_row(offsets_ptr, num_entries, row):
    """b with offsets[b] <= row < offsets[b + 1]; num_entries for rows past the last entry's."""
    lane = tl.arange(0, 128)
    ended = tl.zeros((128,), tl.int32)
    for first in range(1, num_entries + 1, 128):
        index = first + lane
        ends = tl.load(offsets_ptr + index, mask=index <= num_entries, other=2**30)
        ended += (ends <= row).to(tl.int32)
    return tl.sum(ended)


@triton.jit
def entry_of_tile(offsets_ptr, num_entries, tile, ROWS: tl.constexpr):
    """As of a row, where entry b's tiles are numbered from offsets[b] // ROWS + b."""
    lane = tl.arange(0, 128)
    ended = tl.zeros((128,), tl.int32)
    for first in range(1, num_entries + 1, 128):
        index = first + lane
        ends = tl.load(offsets_ptr + index, mask=index <= num_entries, other=2**30)
        ended += (ends // ROWS + index <= tile).to(tl.int32)
    return tl.sum(ended)
