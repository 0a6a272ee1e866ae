"""Limits of a step, the configured ones or the device's defaults, and of a prompt's length."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.config import SchedulerConfig
from rollout.errors import InvalidInputError, OutOfMemoryError

_LARGE_GPU = 64 << 30  # bytes: a card of 80 GB, not one of 48
_RECURRENT = 32  # requests: a state is as large as thousands of cached tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits of `SchedulerConfig`, with defaults filled in."""

    max_running: int
    max_step_tokens: int
    chunk_len: int

    @staticmethod
    def usual(gpu_bytes: int | None, *, recurrent: bool = False) -> StepLimits:
        """The device's defaults. A GPU would idle with less, a CPU would be late with more.

        Args:
            gpu_bytes: the GPU's memory; None: the model runs on a CPU.
            recurrent: the model has recurrent layers, whose states take as much memory per request
                as thousands of cached tokens.
        """
        if gpu_bytes is None:
            return StepLimits(max_running=32, max_step_tokens=512, chunk_len=256)
        # Logits of all running requests and their draft nodes are reserved before KV is.
        running, tokens = (256, 2048) if gpu_bytes >= _LARGE_GPU else (64, 1024)
        return StepLimits(
            max_running=min(running, _RECURRENT) if recurrent else running,
            max_step_tokens=tokens,
            chunk_len=tokens,
        )

    @staticmethod
    def of(
        config: SchedulerConfig, gpu_bytes: int | None, *, recurrent: bool = False
    ) -> StepLimits:
        """The limits of a step; see `usual`. Configured values bound the defaults, since each
        running request needs one token per step."""
        usual = StepLimits.usual(gpu_bytes, recurrent=recurrent)
        running, tokens = config.max_running, config.max_step_tokens
        if running is None:
            running = usual.max_running if tokens is None else min(usual.max_running, tokens)
        if tokens is None:
            tokens = max(usual.max_step_tokens, running)
        chunk_len = config.chunk_len or min(usual.chunk_len, tokens)
        return StepLimits(max_running=running, max_step_tokens=tokens, chunk_len=chunk_len)


def check_length(length: int, max_context_len: int, max_sequence_len: int, field: str) -> None:
    """Raise unless a prompt leaves room for at least one token when it runs alone.

    Args:
        length: the prompt's length in tokens.
        max_sequence_len: largest number of tokens, prompt and output, that the KV slots hold.
        field: the prompt's name in the error.

    Raises InvalidInputError if the context is too short, OutOfMemoryError if KV slots are too few.
    """
    if not 0 < length < max_context_len:
        remedy = f"must have 1 to {max_context_len - 1} tokens: the context is {max_context_len}"
        raise InvalidInputError(f"len({field})", length, remedy)
    if length >= max_sequence_len:
        raise OutOfMemoryError(
            f"{field} of {length} tokens needs {length + 1} KV slots and there are "
            f"{max_sequence_len}: raise memory.kv_bytes or memory.max_kv_tokens"
        )
