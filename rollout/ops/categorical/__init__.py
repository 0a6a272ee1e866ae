"""One token, logprob or entropy per row of logits. R rows, V vocabulary.

Temperature 0 is greedy: the most likely token, the lowest of equals, and the distribution of
temperature 1 for logprob and entropy. A row with a NaN, a +inf or nothing above -inf has no
distribution: its logprob and entropy are NaN.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.categorical import native, reference


def categorical(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    threshold_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw by inverse distribution function: the first token whose cumulative exceeds uniform.

    logits_RV: float32, bfloat16 or float16; temperature_R: float32 >= 0; uniform_R: float64 in
    [0, 1). Returns tokens_R (int64) and logprobs_R (float32). A token of probability zero never
    comes out; a row without a distribution gives token -1 and logprob NaN.

    threshold_R, float32: tokens whose logit is less are not drawn; logprobs stay those of all.
    """
    if gpu.supports(logits_RV):
        from rollout.ops.categorical import triton

        return triton.categorical(logits_RV, temperature_R, uniform_R, threshold_R)
    if native.supports(logits_RV):
        return native.categorical(logits_RV, temperature_R, uniform_R, threshold_R)
    return reference.categorical(logits_RV, temperature_R, uniform_R, threshold_R)


def token_logprobs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, tokens_R: torch.Tensor
) -> torch.Tensor:
    """``logit/T - logsumexp(logits/T)`` of the given tokens, float32.

    tokens_R: int64, [R] or, for several of each row, [R, K]; the result has its shape. Bitwise what
    ``categorical`` returned for the same row and token; token -1 has NaN. Raises IndexError for
    any other token outside the vocabulary; on a GPU its logprob is NaN too.
    """
    if gpu.supports(logits_RV):
        from rollout.ops.categorical import triton

        return triton.token_logprobs(logits_RV, temperature_R, tokens_R)
    if native.supports(logits_RV):
        return native.token_logprobs(logits_RV, temperature_R, tokens_R)
    return reference.token_logprobs(logits_RV, temperature_R, tokens_R)


def entropy(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    """Entropy of ``softmax(logits/T)`` in nats, float32."""
    if gpu.supports(logits_RV):
        from rollout.ops.categorical import triton

        return triton.entropy(logits_RV, temperature_R)
    if native.supports(logits_RV):
        return native.entropy(logits_RV, temperature_R)
    return reference.entropy(logits_RV, temperature_R)
