"""Sampling, logprobs and entropy of logits on the CPU."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["categorical", "entropy", "supports", "token_logprobs"]


def categorical(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    threshold_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    temperature_R, uniform_R = temperature_R.float().contiguous(), uniform_R.double().contiguous()
    if threshold_R is not None:
        threshold_R = threshold_R.float().contiguous()
    tokens_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    logprobs_R = torch.empty(logits_RV.shape[0], dtype=torch.float32)
    cpu.categorical(
        DTYPE_CODES[logits_RV.dtype],
        logits_RV.data_ptr(),
        logits_RV.shape,
        logits_RV.stride(),
        temperature_R.data_ptr(),
        temperature_R.numel(),
        uniform_R.data_ptr(),
        uniform_R.numel(),
        0 if threshold_R is None else threshold_R.data_ptr(),
        0 if threshold_R is None else threshold_R.numel(),
        tokens_R.data_ptr(),
        logprobs_R.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens_R, logprobs_R


def token_logprobs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, tokens_R: torch.Tensor
) -> torch.Tensor:
    temperature_R, tokens_R = temperature_R.float().contiguous(), tokens_R.long().contiguous()
    logprobs_R = torch.empty(tokens_R.shape, dtype=torch.float32)
    cpu.token_logprobs(
        DTYPE_CODES[logits_RV.dtype],
        logits_RV.data_ptr(),
        logits_RV.shape,
        logits_RV.stride(),
        temperature_R.data_ptr(),
        temperature_R.numel(),
        tokens_R.data_ptr(),
        (tokens_R.shape[0], tokens_R.shape[1] if tokens_R.dim() == 2 else 1),
        logprobs_R.data_ptr(),
        torch.get_num_threads(),
    )
    return logprobs_R


def entropy(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    temperature_R = temperature_R.float().contiguous()
    entropy_R = torch.empty(logits_RV.shape[0], dtype=torch.float32)
    cpu.entropy(
        DTYPE_CODES[logits_RV.dtype],
        logits_RV.data_ptr(),
        logits_RV.shape,
        logits_RV.stride(),
        temperature_R.data_ptr(),
        temperature_R.numel(),
        entropy_R.data_ptr(),
        torch.get_num_threads(),
    )
    return entropy_R
