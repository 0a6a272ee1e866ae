"""Gated activations of MLPs. T rows, F ffn.

Each function takes F gate columns, then F up columns, and returns a new contiguous [T, F], computed
in float32 with one rounding.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.glu import native, reference


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, the gate of a SwiGLU MLP."""
    if gpu.supports(gate_up_T2F):
        from rollout.ops.glu import triton

        return triton.silu_mul(gate_up_T2F)
    if native.supports(gate_up_T2F):
        return native.silu_mul(gate_up_T2F)
    return reference.silu_mul(gate_up_T2F)


def gelu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up``, with the tanh approximation of GELU."""
    if gpu.supports(gate_up_T2F):
        from rollout.ops.glu import triton

        return triton.gelu_mul(gate_up_T2F)
    if native.supports(gate_up_T2F):
        return native.gelu_mul(gate_up_T2F)
    return reference.gelu_mul(gate_up_T2F)


def clamped_silu_mul(gate_up_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """``gate * sigmoid(alpha * gate) * (up + 1)``, where gate is at most ``limit`` and up within
    ``[-limit, limit]``."""
    if gpu.supports(gate_up_T2F):
        from rollout.ops.glu import triton

        return triton.clamped_silu_mul(gate_up_T2F, alpha, limit)
    if native.supports(gate_up_T2F):
        return native.clamped_silu_mul(gate_up_T2F, alpha, limit)
    return reference.clamped_silu_mul(gate_up_T2F, alpha, limit)
