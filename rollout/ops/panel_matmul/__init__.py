"""The product of a few rows with a weight in oneDNN's packed layout.

oneDNN takes twice the time at one to four rows, and 1.1 times at 48: see
benchmarks/bench_ops.py.

Legend: M rows, I input, O output features, P panels of 64 outputs, U units of a row (two numbers),
L a unit of 64 rows: 128 numbers.
"""

from __future__ import annotations

import torch

from rollout.ops.panel_matmul import native, reference
from rollout.ops.panel_matmul.native import supports

__all__ = ["native", "panel_matmul", "reference", "supports"]


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
    """
    if native.supports(x_MI, panels_PUL):
        return native.panel_matmul(x_MI, panels_PUL, out_features, bias_O, sum_block)
    return reference.panel_matmul(x_MI, panels_PUL, out_features, bias_O, sum_block)
