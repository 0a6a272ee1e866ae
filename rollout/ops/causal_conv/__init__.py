"""The short convolution before a recurrent layer.

Legend: T rows, C channels, W taps, w = W - 1, S slots.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.causal_conv import native, reference
from rollout.ops.state_plan import StatePlan


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_SCw: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    """``silu(bias + sum over taps of weight * input)``, summed in float32, oldest first.

    A row's inputs are x of the row and of the w rows before it on its path; those of earlier steps
    come from its entry's source. The state after a row, its last w inputs, oldest first, is written
    to the row's target. All tensors have one dtype, and the result is rounded once. Rows of x_TC
    may be strided, with contiguous elements. Padding rows give zeros. Returns a new contiguous [T,
    C]. Raises ValueError or IndexError if the plan contradicts itself or names a row or slot that
    does not exist; on a GPU nothing checks that.
    """
    if gpu.runs_on(x_TC.device):
        from rollout.ops.causal_conv import triton

        if triton.supports(x_TC, weight_CW, bias_C, states_SCw):
            return triton.causal_conv(x_TC, weight_CW, bias_C, states_SCw, plan)
    if native.supports(x_TC, weight_CW, bias_C, states_SCw):
        return native.causal_conv(x_TC, weight_CW, bias_C, states_SCw, plan)
    return reference.causal_conv(x_TC, weight_CW, bias_C, states_SCw, plan)
