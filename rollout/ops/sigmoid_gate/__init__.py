"""The gate of a gated attention's output. T rows, H heads, D head_dim."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.sigmoid_gate import native, reference


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> None:
    """``x *= sigmoid(gate)`` in place, in float32 with one rounding.

    x, gate: [T, D] or [T, H, D] of one dtype; may be strided, with contiguous last dims.
    """
    if gpu.supports(x, gate):
        from rollout.ops.sigmoid_gate import triton

        triton.sigmoid_gate_(x, gate)
    elif native.supports(x, gate):
        native.sigmoid_gate_(x, gate)
    else:
        reference.sigmoid_gate_(x, gate)
