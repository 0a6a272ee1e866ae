"""A weight in panels for `ops.tile_matmul`, whose rows can be rewritten in place.

Legend: M rows, O output features, I input features, P panels, U units, L a unit of 32 rows (see
rollout.ops.tile_matmul).
"""

from __future__ import annotations

import torch

from rollout.models.layers.storage import prefer_huge_pages
from rollout.ops.panels import read_panels, write_panels
from rollout.ops.tile_matmul.native import LANES, TILE_UNITS, supports, tile_matmul


class TiledWeight:
    """A packed weight for a processor with matrix tiles.

    Its products add in one order for any number of rows. Its address never changes.
    """

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self._shape = outputs, inputs = weight_OI.shape
        units = -(-inputs // (2 * TILE_UNITS)) * TILE_UNITS
        shape = (-(-outputs // LANES), units, 2 * LANES)
        self._panels_PUL = torch.empty(shape, dtype=weight_OI.dtype)
        self.num_bytes = self._panels_PUL.nbytes  # padding included
        prefer_huge_pages(self._panels_PUL.data_ptr(), self.num_bytes)
        self._panels_PUL.zero_()
        self.write(0, weight_OI)

    @staticmethod
    def pack(weight_OI: torch.Tensor) -> TiledWeight | None:
        """Pack a weight. None if this processor has no tiles for its dtype."""
        return TiledWeight(weight_OI) if supports(weight_OI.dtype, weight_OI.device) else None

    def multiply(self, x_MI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``: [M, O]. A row's bits depend on that row alone."""
        return tile_matmul(x_MI, self._panels_PUL, self._shape[0], bias_O)

    def write(self, first_row: int, rows_MI: torch.Tensor) -> None:
        """Replace rows from ``first_row`` on by contiguous CPU rows of the same dtype."""
        write_panels(self._panels_PUL, first_row, rows_MI)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A plain copy of rows [start, stop)."""
        rows_MI = self._panels_PUL.new_empty((stop - start, self._shape[1]))
        read_panels(self._panels_PUL, start, rows_MI)
        return rows_MI
