"""Limits of one step: the configured ones, else the device's defaults."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.config import SchedulerConfig

_LARGE_GPU = 64 << 30
_RECURRENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits of `SchedulerConfig`, with defaults filled in."""

    max_running: int
    max_step_tokens: int
    chunk_len: int

    @staticmethod
    def usual(device: torch.device, *, recurrent: bool = False) -> StepLimits:
        """The device's defaults. A GPU would idle with less, a CPU would be late with more.

        ``recurrent``: the model has recurrent layers, whose states take as much memory per request
        as thousands of cached tokens.
        """
        if device.type == "cpu":
            return StepLimits(max_running=32, max_step_tokens=512, chunk_len=256)
        # Logits of all running requests and their draft nodes are reserved before KV is.
        is_large = torch.cuda.get_device_properties(device).total_memory >= _LARGE_GPU
        running, tokens = (256, 2048) if is_large else (64, 1024)
        return StepLimits(
            max_running=min(running, _RECURRENT) if recurrent else running,
            max_step_tokens=tokens,
            chunk_len=tokens,
        )

    @staticmethod
    def of(config: SchedulerConfig, device: torch.device, *, recurrent: bool = False) -> StepLimits:
        """The limits of a step. Configured values bound the defaults, since each running request
        needs one token per step."""
        usual = StepLimits.usual(device, recurrent=recurrent)
        running, tokens = config.max_running, config.max_step_tokens
        if running is None:
            running = usual.max_running if tokens is None else min(usual.max_running, tokens)
        if tokens is None:
            tokens = max(usual.max_step_tokens, running)
        chunk_len = config.chunk_len or min(usual.chunk_len, tokens)
        return StepLimits(max_running=running, max_step_tokens=tokens, chunk_len=chunk_len)
