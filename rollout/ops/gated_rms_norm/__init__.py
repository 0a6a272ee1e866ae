"""RMS normalisation with a gate after it. T rows, G heads, V dims of a head."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.gated_rms_norm import native, reference


def gated_rms_norm(
    x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    """``rms_norm(x, weight, eps)`` of every head, times ``silu(gate)`` in float32, rounded again.

    All tensors have one dtype and may be strided, with contiguous elements of a head. Returns a new
    contiguous [T, G, V].
    """
    if gpu.supports(x_TGV, gate_TGV, weight_V):
        from rollout.ops.gated_rms_norm import triton

        return triton.gated_rms_norm(x_TGV, gate_TGV, weight_V, eps)
    if native.supports(x_TGV, gate_TGV, weight_V):
        return native.gated_rms_norm(x_TGV, gate_TGV, weight_V, eps)
    return reference.gated_rms_norm(x_TGV, gate_TGV, weight_V, eps)
