"""Reads and writes rows of a weight in panels: oneDNN's packed layout, and that of `tile_matmul`.

Legend: O output features (rows), I input features, P panels of 64 rows (32 for tiles), U units of a
row (one float32 or two 16-bit numbers), L a unit of all rows of a panel.
"""

from __future__ import annotations

import torch

from rollout.ops.panels import native, reference

LANES = 64
"""Rows of a panel in oneDNN's layout."""


def write_panels(panels_PUL: torch.Tensor, first_row: int, rows_MI: torch.Tensor) -> None:
    """Replace rows [first_row, first_row + M) by M rows of the same dtype."""
    if native.supports(panels_PUL, rows_MI):
        native.write_panels(panels_PUL, first_row, rows_MI)
    else:
        reference.write_panels(panels_PUL, first_row, rows_MI)


def read_panels(panels_PUL: torch.Tensor, first_row: int, rows_MI: torch.Tensor) -> None:
    """Copy rows [first_row, first_row + M) into ``rows_MI``. Same dtype."""
    if native.supports(panels_PUL, rows_MI):
        native.read_panels(panels_PUL, first_row, rows_MI)
    else:
        reference.read_panels(panels_PUL, first_row, rows_MI)
