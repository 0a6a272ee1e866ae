"""The shapes a forward is captured in, and which of them holds a step.

Legend: T query rows, B entries, N draft nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from numpy.typing import NDArray

from rollout.runner.batch_layout import StepArrays

_ENTRIES_STEP = 4
_FIRST_LONGEST = 1024
_LONGEST_STEP = 2  # attention's grid is made for at most this many times the keys


class Bucket(NamedTuple):
    """Shapes that a step is padded to: what is fixed in a captured forward."""

    rows: int
    entries: int
    nodes: int
    longest: int  # no run ends past it


class Buckets:
    """Rows are 1, 2, 4, 8, 16, 32, 48, 64, and from there on go up by a quarter of the power of two
    below: 80, 96, 112, 128, 160, ..., 1024.

    Up to 64 rows a forward is bound by reading the weights, so that padding costs next to nothing.
    Above, a bucket and the tiles of matrix products together compute at most 1.5 times the rows
    that there are. Entries go up by powers of four: attention's grid grows with them, but each
    shape has to be captured, which takes as long as some steps. Nodes are none or as many as rows.

    Where they are ``fine``, rows go up by one to 16, and from there on by an eighth of the power of
    two below: for products to which a row of padding costs what another does.

    With ``pads_entries`` entries and nodes are always as many as rows, and the longest run does not
    matter: for a CPU, where entries and nodes of padding cost nothing.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_context_len: int,
        minimum_rows: int = 1,
        fine: bool = False,
        pads_entries: bool = False,
    ) -> None:
        """Steps of more than ``max_rows`` have none; ``minimum_rows`` is the least bucket."""
        few = {1 << k for k in range(7)} | {48}
        many = {(4 + part) << k for k in range(4, 30) for part in range(1, 5)}
        eighths = {(8 + part) << k for k in range(28) for part in range(8)} | set(range(1, 8))
        sizes = sorted(eighths if fine else few | many)
        self.rows = tuple(rows for rows in sizes if minimum_rows <= rows <= max_rows)
        self.fine = fine
        self._pads_entries = pads_entries
        self._max_context_len = max_context_len

    def bucket(self, step: StepArrays[NDArray]) -> Bucket | None:
        """The least that holds the step; None for a step of no entries, or too large."""
        entries = len(step.rows_B)
        index = bisect_left(self.rows, step.num_rows)
        if index == len(self.rows) or not entries:
            return None
        rows = self.rows[index]
        if self._pads_entries:
            return Bucket(rows=rows, entries=rows, nodes=rows, longest=self._max_context_len)
        padded_entries = 1
        while padded_entries < entries:
            padded_entries *= _ENTRIES_STEP
        longest = _FIRST_LONGEST
        while longest < step.longest:
            longest *= _LONGEST_STEP
        return Bucket(
            rows=rows,
            entries=min(rows, padded_entries),
            nodes=rows if len(step.node_slots_N) else 0,
            longest=min(longest, self._max_context_len),
        )

    @property
    def input_bytes(self) -> int:
        """An upper bound on the bytes that captured forwards of any bucket read as input."""
        return 72 * (max(self.rows, default=0) + 64)
