"""Sampling, logprobs and entropy of rows of logits. R rows, V vocabulary.

Temperature 0 is greedy: the most likely token, the lowest of equal ones, with the logprob and
entropy of temperature 1. A row with a NaN, a +inf or nothing above -inf has no distribution: its
logprob and entropy are NaN.
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
    """Sample by inverse distribution function: the first token whose cumulative exceeds uniform.

    Returns tokens_R (int64) and logprobs_R (float32). A token of probability zero is never drawn. A
    row without a distribution gives token -1 and logprob NaN.

    Args:
        logits_RV: float32, bfloat16 or float16.
        temperature_R: float32 >= 0.
        uniform_R: float64 in [0, 1).
        threshold_R: float32; tokens with a lower logit are not drawn. Logprobs ignore it.
    """
    if gpu.supports(logits_RV):
        from rollout.ops.categorical import triton

        return triton.categorical(logits_RV, temperature_R, uniform_R, threshold_R)
    if threshold_R is not None:
        cut_RV = logits_RV.masked_fill(logits_RV < threshold_R[:, None], float("-inf"))
        tokens_R, _ = categorical(cut_RV, temperature_R, uniform_R)
        logprobs_R = token_logprobs(logits_RV, temperature_R, tokens_R.clamp(min=0))
        return tokens_R, logprobs_R.masked_fill(tokens_R < 0, float("nan"))
    if native.supports(logits_RV):
        return native.categorical(logits_RV, temperature_R, uniform_R)
    return reference.categorical(logits_RV, temperature_R, uniform_R)


def token_logprobs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, tokens_R: torch.Tensor
) -> torch.Tensor:
    """``logit/T - logsumexp(logits/T)`` of the given tokens, float32 in the shape of ``tokens_R``.

    ``tokens_R``: int64, [R] or [R, K]. Bitwise what `categorical` returns for the same row and
    token. Raises IndexError for a token outside the vocabulary; on a GPU its logprob is NaN
    instead.
    """
    if gpu.supports(logits_RV):
        from rollout.ops.categorical import triton

        return triton.token_logprobs(logits_RV, temperature_R, tokens_R)
    if tokens_R.dim() == 2:
        columns = [
            token_logprobs(logits_RV, temperature_R, each_R) for each_R in tokens_R.unbind(1)
        ]
        return torch.stack(columns, dim=1) if columns else torch.empty(tokens_R.shape)
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
