"""Top-k, top-p and min-p as the smallest surviving logit. R rows, V vocabulary."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.truncation import reference


def truncation_threshold(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    """The threshold that `rollout.sampling.truncation` defines: float32 [R], -inf for no cut.

    Args:
        logits_RV: float32, bfloat16 or float16.
        temperature_R: float32; 0 counts as 1.
        top_k_R: int64; <= 0 is off.
        top_p_R: float32; 1 is off.
        min_p_R: float32; 0 is off.
    """
    if gpu.supports(logits_RV):
        from rollout.ops.truncation import triton

        return triton.truncation_threshold(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return reference.truncation_threshold(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
