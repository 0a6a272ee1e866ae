"""Rows of a packed weight in plain torch, one by one."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def write_panels(panels_PUL: torch.Tensor, first_row: int, rows_MI: torch.Tensor) -> None:
    for lane_U, row_U in _lanes(panels_PUL, first_row, rows_MI):
        lane_U.copy_(row_U)


def read_panels(panels_PUL: torch.Tensor, first_row: int, rows_MI: torch.Tensor) -> None:
    for lane_U, row_U in _lanes(panels_PUL, first_row, rows_MI):
        row_U.copy_(lane_U)


def _lanes(
    panels_PUL: torch.Tensor, first_row: int, rows_MI: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of each row in the panels and in ``rows_MI``; for 16-bit numbers, one per unit half."""
    elements = 4 // panels_PUL.element_size()
    panels_PULE = panels_PUL.view(*panels_PUL.shape[:2], -1, elements)
    lanes = panels_PULE.shape[2]
    for row, row_I in enumerate(rows_MI, start=first_row):
        for element in range(elements):
            row_U = row_I[element::elements]
            yield panels_PULE[row // lanes, : row_U.numel(), row % lanes, element], row_U
