"""RMS normalisation. E hidden, T rows."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.rms_norm import native, reference


def rms_norm(
    x: torch.Tensor, weight_E: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps)`` rounded to x.dtype, times weight, rounded again.

    With ``unit_offset``, as in Qwen3-Next and Gemma: times ``1 + weight``, all in float32, rounded
    once. x: [..., E]; rows may be strided, with contiguous elements. weight_E has x's dtype.
    Returns a new contiguous tensor of x's shape and dtype.
    """
    if gpu.supports(x, weight_E):
        from rollout.ops.rms_norm import triton

        return triton.rms_norm(x, weight_E, eps, unit_offset)
    if native.supports(x, weight_E):
        return native.rms_norm(x, weight_E, eps, unit_offset)
    return reference.rms_norm(x, weight_E, eps, unit_offset)


def add_rms_norm(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> torch.Tensor:
    """``residual += x`` in place, rounded; returns ``rms_norm(residual)``. Tensors have one
    dtype."""
    if gpu.supports(x_TE, residual_TE, weight_E):
        from rollout.ops.rms_norm import triton

        return triton.add_rms_norm(x_TE, residual_TE, weight_E, eps, unit_offset)
    if native.supports(x_TE, residual_TE, weight_E):
        return native.add_rms_norm(x_TE, residual_TE, weight_E, eps, unit_offset)
    return reference.add_rms_norm(x_TE, residual_TE, weight_E, eps, unit_offset)
