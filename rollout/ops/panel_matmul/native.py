"""The product of a few rows with a packed weight, on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import cpu


def supports(x_MI: torch.Tensor, panels_PUL: torch.Tensor) -> bool:
    """Whether the compiled op takes these tensors."""
    return (
        cpu is not None
        and cpu.has_panel_matmul()
        and x_MI.dtype is torch.bfloat16
        and panels_PUL.dtype is torch.bfloat16
        and x_MI.is_cpu
        and panels_PUL.is_contiguous()
        and x_MI.shape[1] % 2 == 0
    )


def panel_matmul(
    x_MI: torch.Tensor,
    panels_PUL: torch.Tensor,
    out_features: int,
    bias_O: torch.Tensor | None,
    sum_block: int,
) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32 and rounded once: [M, O], bfloat16.

    A row's bits depend on that row alone. ``x_MI`` may have strided rows.

    Args:
        panels_PUL: contiguous, of the packed weight; see `rollout.ops.panels`.
        sum_block: inputs that are summed in one chain before the sum joins the others', even.

    Raises ValueError for sizes that disagree.
    """
    if x_MI.stride(1) != 1:
        x_MI = x_MI.contiguous()
    y_MO = x_MI.new_empty((x_MI.shape[0], out_features))
    cpu.panel_matmul(
        x_MI.data_ptr(),
        x_MI.shape,
        x_MI.stride(),
        panels_PUL.data_ptr(),
        panels_PUL.shape,
        out_features,
        0 if bias_O is None else bias_O.data_ptr(),
        y_MO.data_ptr(),
        sum_block,
        torch.get_num_threads(),
    )
    return y_MO
