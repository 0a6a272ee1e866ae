"""How much a gated delta rule forgets and learns of each row. T rows, G value heads."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.delta_gates import native, reference


def delta_gates(
    a_TG: torch.Tensor, b_TG: torch.Tensor, A_log_G: torch.Tensor, dt_bias_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-exp(A_log) * softplus(a + dt_bias)``, the log decay, and ``sigmoid(b)``, the step size.

    a_TG, b_TG: one dtype, rows may be strided but their elements are adjacent; A_log_G, dt_bias_G:
    any dtype. All in float32. Returns two new contiguous float32 [T, G].
    """
    if gpu.supports(a_TG, b_TG):
        from rollout.ops.delta_gates import triton

        return triton.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)
    if native.supports(a_TG, b_TG):
        return native.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)
    return reference.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)
