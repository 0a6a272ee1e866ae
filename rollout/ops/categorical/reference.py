"""Sampling, logprobs and entropy of a softmax in plain torch, float64 inside."""

from __future__ import annotations

import torch


def categorical(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    threshold_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    probs_RV = _log_softmax(logits_RV, temperature_R).exp()
    if threshold_R is not None:
        probs_RV = probs_RV.masked_fill(logits_RV < threshold_R[:, None], 0.0)
    cumulative_RV = probs_RV.cumsum(-1)
    target_R1 = (uniform_R.double() * cumulative_RV[:, -1]).unsqueeze(1)
    # Where rounding lets no cumulative exceed the target, the last possible token is meant.
    possible_RV = probs_RV > 0
    index_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    last_R = torch.where(possible_RV, index_V, 0).amax(-1)
    exceeds_RV = (cumulative_RV > target_R1) & possible_RV
    sampled_R = torch.where(exceeds_RV.any(-1), exceeds_RV.int().argmax(-1), last_R)

    logits_f32_RV = logits_RV.float()
    maximum_R1 = logits_f32_RV.amax(-1, keepdim=True)
    greedy_R = (logits_f32_RV == maximum_R1).int().argmax(-1)  # the first of equals
    tokens_R = torch.where(temperature_R == 0, greedy_R, sampled_R)
    logprobs_R = token_logprobs(logits_RV, temperature_R, tokens_R)
    return tokens_R.masked_fill(logprobs_R.isnan(), -1), logprobs_R


def token_logprobs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, tokens_R: torch.Tensor
) -> torch.Tensor:
    tokens_RK = tokens_R if tokens_R.dim() == 2 else tokens_R[:, None]
    logprobs_RK = _log_softmax(logits_RV, temperature_R).gather(1, tokens_RK.clamp(min=0))
    return logprobs_RK.masked_fill(tokens_RK < 0, float("nan")).view(tokens_R.shape).float()


def entropy(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    logprobs_RV = _log_softmax(logits_RV, temperature_R)
    return -torch.xlogy(logprobs_RV.exp(), logprobs_RV.exp()).sum(-1).float()


def _log_softmax(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    divisor_R = torch.where(temperature_R == 0, 1.0, temperature_R.double())
    return torch.log_softmax(logits_RV.double() / divisor_R.unsqueeze(1), dim=-1)
