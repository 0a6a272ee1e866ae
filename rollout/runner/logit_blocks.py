"""The rows whose logits are computed and sampled from together.

A step of 1,024 requests with drafts samples at 17,000 rows: all of their logits would take 10 bytes
times the vocabulary for each.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_ROWS = 1024


def logit_blocks(num_rows: int) -> Iterator[slice]:
    """Blocks of at most `MAX_ROWS` rows, all of one size or one more: at least one block, since a
    sharded head is a collective of zero rows too."""
    count = max(1, -(-num_rows // MAX_ROWS))
    for block in range(count):
        yield slice(block * num_rows // count, (block + 1) * num_rows // count)
