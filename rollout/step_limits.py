"""How much one step takes on: what was configured, else what suits the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Fields of `SchedulerConfig`, each of them known."""

    max_running: int
    max_step_tokens: int
    chunk_len: int

    @staticmethod
    def usual(device_type: str) -> StepLimits:
        """Where nothing is configured. A GPU is idle with less, a CPU late with more."""
        if device_type == "cpu":
            return StepLimits(max_running=32, max_step_tokens=512, chunk_len=256)
        return StepLimits(max_running=256, max_step_tokens=2048, chunk_len=2048)

    @staticmethod
    def of(config: SchedulerConfig, device: torch.device) -> StepLimits:
        """What is configured bounds what is not: each running request needs a token of the step."""
        usual = StepLimits.usual(device.type)
        running, tokens = config.max_running, config.max_step_tokens
        if running is None:
            running = usual.max_running if tokens is None else min(usual.max_running, tokens)
        if tokens is None:
            tokens = max(usual.max_step_tokens, running)
        chunk_len = config.chunk_len or min(usual.chunk_len, tokens)
        return StepLimits(max_running=running, max_step_tokens=tokens, chunk_len=chunk_len)
