"""Top-k, top-p and min-p as one threshold on the logits of a row. R rows, V vocabulary.

A threshold, and not a set of ranks, so that tokens with equal logits are kept or dropped together
and no sort order can be seen in the output.
"""

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
    """The least logit that survives in each row: float32 [R], -inf where nothing is cut.

    top_k keeps the k largest (ties with the k-th too), top_p then the smallest set of what is left
    whose renormalised probability reaches p, min_p what is at least p times the most likely token.

    Args: logits float32, bfloat16 or float16; temperature float32 (0 counts as 1); top_k int64
    (<= 0 is off); top_p float32 (1 is off); min_p float32 (0 is off).
    """
    if gpu.supports(logits_RV):
        from rollout.ops.truncation import triton

        return triton.truncation_threshold(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return reference.truncation_threshold(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
