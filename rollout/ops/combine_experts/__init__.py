"""The sum of a row's experts. T rows, X experts per row, E hidden."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.combine_experts import reference


def combine_experts(
    outputs_TXE: torch.Tensor,
    weights_TX: torch.Tensor,
    shared_TE: torch.Tensor | None = None,
    shared_gate_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum_x weights[:, x] * outputs[:, x] + sigmoid(shared_gate) * shared``: a new [T, E].

    Without ``shared_gate_T`` the shared expert is added as it is.

    Summed in float32 in the order of x, the shared expert last, and rounded once to the dtype of
    the outputs. transformers rounds weights, terms and, in some implementations, every partial sum.

    Args:
        weights_TX: float32.
        shared_TE: of the outputs' dtype.
        shared_gate_T: the value before its sigmoid; may be strided; needs ``shared_TE``.
    """
    if gpu.supports(outputs_TXE):
        from rollout.ops.combine_experts import triton

        return triton.combine_experts(outputs_TXE, weights_TX, shared_TE, shared_gate_T)
    return reference.combine_experts(outputs_TXE, weights_TX, shared_TE, shared_gate_T)
