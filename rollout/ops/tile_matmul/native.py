"""The product of rows with a packed weight by tiles, on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import cpu

TILE_UNITS, LANES = 16, 32
"""Units of a tile, of which panels have a multiple, and outputs of a panel."""


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled op multiplies rows of this dtype there."""
    return (
        dtype is torch.bfloat16
        and device.type == "cpu"
        and cpu is not None
        and cpu.has_tile_matmul()
    )


def tile_matmul(
    x_MI: torch.Tensor, panels_PUL: torch.Tensor, out_features: int, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32 and rounded once: [M, O], bfloat16.

    A row's bits depend on that row alone. ``x_MI`` may have strided rows.

    Args:
        panels_PUL: contiguous; see `rollout.ops.panels`. Zeros follow the inputs.

    Raises ValueError for sizes that disagree.
    """
    if x_MI.stride(1) != 1:
        x_MI = x_MI.contiguous()
    y_MO = x_MI.new_empty((x_MI.shape[0], out_features))
    cpu.tile_matmul(
        x_MI.data_ptr(),
        x_MI.shape,
        x_MI.stride(),
        panels_PUL.data_ptr(),
        panels_PUL.shape,
        out_features,
        0 if bias_O is None else bias_O.data_ptr(),
        y_MO.data_ptr(),
        torch.get_num_threads(),
    )
    return y_MO
