"""The shapes a forward is captured in, and which of them holds a step."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from numpy.typing import NDArray

from rollout.runner.batch_layout import StepArrays


class Bucket(NamedTuple):
    """Shapes that a step is padded to: what is fixed in a captured forward. Entries are as many as
    rows."""

    rows: int
    nodes: int


class Buckets:
    """Rows are 1, 2, 4, 8, 16, 32, 48, 64, and from there on go up by an eighth of the power of two
    below: 72, 80, ..., 128, 144, ..., 1024. Nodes are none or as many as rows.

    Up to 64 rows a forward on a GPU is bound by reading the weights, so that padding costs next to
    nothing. Where buckets are ``fine``, rows go up by one to 16, and from there on by eighths too:
    for products to which a row of padding costs what another does.

    With ``always_nodes`` there is no bucket without: for a CPU, where nodes of padding cost
    nothing.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        minimum_rows: int = 1,
        fine: bool = False,
        always_nodes: bool = False,
    ) -> None:
        """Steps of more than ``max_rows`` have none; ``minimum_rows`` is the least bucket."""
        eighths = {(8 + part) << k for k in range(28) for part in range(8)} | set(range(1, 8))
        few = {1 << k for k in range(7)} | {48}
        sizes = eighths if fine else few | {rows for rows in eighths if rows > 64}
        self.rows = tuple(rows for rows in sorted(sizes) if minimum_rows <= rows <= max_rows)
        self.fine = fine
        self._always_nodes = always_nodes

    def bucket(self, step: StepArrays[NDArray]) -> Bucket | None:
        """The least that holds the step; None for a step of no entries, or too large."""
        index = bisect_left(self.rows, step.num_rows)
        if index == len(self.rows) or not len(step.rows_B):
            return None
        rows = self.rows[index]
        has_nodes = self._always_nodes or len(step.node_slots_N) > 0
        return Bucket(rows, rows if has_nodes else 0)

    @property
    def input_bytes(self) -> int:
        """An upper bound on the bytes that captured forwards of any bucket read as input."""
        return 72 * (max(self.rows, default=0) + 64)
