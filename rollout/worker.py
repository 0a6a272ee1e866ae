"""What the engine is handed: a worker that turns a batch into emitted tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from rollout.memory.cache import CacheMemory
from rollout.types import Batch, Request, SamplingParams, StepResult, TokenExtras


class Worker(Protocol):
    """The engine knows nothing else of speculation.

    Every method runs on the engine's thread. ``step`` commits accepted tokens' KV into
    ``memory.req_to_token``; appending tokens to requests is the scheduler's.
    """

    memory: CacheMemory
    vocab_size: int
    max_context_len: int
    weight_version: int

    @property
    def max_draft_tokens(self) -> int:
        """Draft nodes one request may ask for in a step, root excluded."""
        ...

    def step(self, batch: Batch) -> StepResult: ...

    def release(self, request: Request) -> None:
        """The request ended: forget what was kept for it. Its tokens stay in the corpus."""
        ...

    def score(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
    ) -> tuple[list[float], TokenExtras]: ...

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int
    ) -> None: ...

    def counters(self) -> dict[str, float]:
        """The worker's own gauges (corpus size, KV use...), for metrics."""
        ...
