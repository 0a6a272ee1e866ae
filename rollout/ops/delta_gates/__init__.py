"""The decay and step size of a gated delta rule. T rows, G value heads."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.delta_gates import native, reference


def delta_gates(
    a_TG: torch.Tensor, b_TG: torch.Tensor, A_log_G: torch.Tensor, dt_bias_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log decay ``-exp(A_log) * softplus(a + dt_bias)`` and the step size ``sigmoid(b)``.

    Computed in float32. Returns two new contiguous float32 [T, G]. a_TG and b_TG have one dtype;
    their rows may be strided, with contiguous elements. A_log_G and dt_bias_G have any dtype.
    """
    if gpu.supports(a_TG, b_TG):
        from rollout.ops.delta_gates import triton

        return triton.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)
    if native.supports(a_TG, b_TG):
        return native.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)
    return reference.delta_gates(a_TG, b_TG, A_log_G, dt_bias_G)
