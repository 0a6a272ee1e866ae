"""The gates around a gated delta rule and gated attention.

Legend: T rows, G value heads, V dims of a head; H heads, D head dim.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.gates import native, reference


def delta_gates(
    a_TG: torch.Tensor, b_TG: torch.Tensor, A_log_G: torch.Tensor, dt_bias_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log decay ``-exp(A_log) * softplus(a + dt_bias)`` and the step size ``sigmoid(b)``.

    Computed in float32. Returns two new contiguous float32 [T, G]. a_TG and b_TG have one dtype;
    their rows may be strided, with contiguous elements. A_log_G and dt_bias_G have any dtype.
    """
    if gpu.supports(a_TG, b_TG):
        from rollout.ops.gates import triton

        return triton.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)
    if native.supports(a_TG, b_TG):
        return native.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)
    return reference.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)


def gated_rms_norm(
    x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    """``rms_norm(x, weight, eps)`` of every head, times ``silu(gate)`` in float32, rounded again.

    All tensors have one dtype and may be strided, with contiguous elements of a head. Returns a new
    contiguous [T, G, V].
    """
    if gpu.supports(x_TGV, gate_TGV, weight_V):
        from rollout.ops.gates import triton

        return triton.gated_rms_norm(x_TGV, gate_TGV, weight_V, eps)
    if native.supports(x_TGV, gate_TGV, weight_V):
        return native.gated_rms_norm(x_TGV, gate_TGV, weight_V, eps)
    return reference.gated_rms_norm(x_TGV, gate_TGV, weight_V, eps)


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> None:
    """``x *= sigmoid(gate)`` in place, in float32 with one rounding.

    x, gate: [T, D] or [T, H, D] of one dtype; may be strided, with contiguous last dims.
    """
    if gpu.supports(x, gate):
        from rollout.ops.gates import triton

        triton.sigmoid_gate_(x, gate)
    elif native.supports(x, gate):
        native.sigmoid_gate_(x, gate)
    else:
        reference.sigmoid_gate_(x, gate)
