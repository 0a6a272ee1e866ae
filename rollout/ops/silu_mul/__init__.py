"""The gate of a SwiGLU MLP. T rows, F ffn."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.silu_mul import native, reference


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` in float32 with one rounding.

    gate_up_T2F: F gate columns, then F up columns. Returns a new contiguous [T, F].
    """
    if gpu.supports(gate_up_T2F):
        from rollout.ops.silu_mul import triton

        return triton.silu_mul(gate_up_T2F)
    if native.supports(gate_up_T2F):
        return native.silu_mul(gate_up_T2F)
    return reference.silu_mul(gate_up_T2F)
