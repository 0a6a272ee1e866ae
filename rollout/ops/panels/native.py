"""Rows of a packed weight on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout.ops.extension import DTYPE_CODES, cpu
from rollout.ops.extension import supports as supports_tensors


def supports(panels_PUL: torch.Tensor, rows_MI: torch.Tensor) -> bool:
    """Whether the compiled ops take these tensors."""
    return supports_tensors(panels_PUL, rows_MI) and panels_PUL.is_contiguous()


def write_panels(panels_PUL: torch.Tensor, first_row: int, rows_MI: torch.Tensor) -> None:
    _move(cpu.write_panels, panels_PUL, first_row, rows_MI)


def read_panels(panels_PUL: torch.Tensor, first_row: int, rows_MI: torch.Tensor) -> None:
    _move(cpu.read_panels, panels_PUL, first_row, rows_MI)


def _move(
    move: Callable[..., None], panels_PUL: torch.Tensor, first_row: int, rows_MI: torch.Tensor
) -> None:
    move(
        DTYPE_CODES[rows_MI.dtype],
        panels_PUL.data_ptr(),
        panels_PUL.shape,
        rows_MI.data_ptr(),
        rows_MI.shape,
        rows_MI.stride(),
        first_row,
        torch.get_num_threads(),
    )
