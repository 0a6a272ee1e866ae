"""The KV slot of each position of each running request: a row per request, a column per
position."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rollout.errors import IntegrityError


class ReqToToken:
    """``table[row, position]`` is the KV slot of that position, int32 [max_rows, max_context_len].

    KVCacheManager knows who owns the slots, and up to which position a row's entries are valid.
    """

    def __init__(self, max_rows: int, max_context_len: int) -> None:
        self.table = np.zeros((max_rows, max_context_len), dtype=np.int32)
        self._free_rows = list(range(max_rows - 1, -1, -1))  # the lowest is taken first

    @property
    def max_rows(self) -> int:
        """The most requests that run at once."""
        return self.table.shape[0]

    @property
    def max_context_len(self) -> int:
        """Positions of a row."""
        return self.table.shape[1]

    @property
    def available(self) -> int:
        """Rows that are free now."""
        return len(self._free_rows)

    def allocate_row(self) -> int:
        """Take a free row. There must be one."""
        assert self._free_rows, f"all {self.max_rows} rows are taken"
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Make a row free again; its entries stay."""
        self._free_rows.append(row)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise IntegrityError unless every row is free or in ``held``, exactly once."""
        rows = sorted([*self._free_rows, *held])
        if rows != list(range(self.max_rows)):
            raise IntegrityError(f"free and held rows are {rows}, not [0, {self.max_rows}) once")
