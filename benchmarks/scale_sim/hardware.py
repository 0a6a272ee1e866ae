"""What a decode step of one replica costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A decode step reads all weights once and each request's KV once: memory-bound, as decoding is
    at these batch sizes. Prefill is left out: a group's prompt is computed once and is short beside
    its answers."""

    weight_bytes: float
    kv_bytes_per_token: float
    bytes_per_second: float  # of memory, as reached
    overhead_seconds: float  # of a step: launches, sampling, scheduling

    @property
    def base_seconds(self) -> float:
        return self.overhead_seconds + self.weight_bytes / self.bytes_per_second

    @property
    def seconds_per_context_token(self) -> float:
        return self.kv_bytes_per_token / self.bytes_per_second


# 8.03 billion parameters in bfloat16; 32 layers of 8 KV heads of 128; 70 % of 3.35 TB/s.
LLAMA_8B = Hardware(
    weight_bytes=16.06e9,
    kv_bytes_per_token=131_072,
    bytes_per_second=0.7 * 3.35e12,
    overhead_seconds=2e-3,
)

_RUNNING = np.array([1, 4, 16, 64, 256])
_ACCEPTED = np.array([2.8, 2.6, 2.2, 1.4, 1.0])


def accept_length(running: int, *, speculates: bool) -> float:
    """Tokens a request gets per step: many where few run, one where drafts do not pay.

    An assumption: accept lengths of a few tokens were measured on recorded rollouts at small
    batches, and budgets close as batches get wide.
    """
    if not speculates:
        return 1.0
    return float(np.interp(np.log(running), np.log(_RUNNING), _ACCEPTED))
