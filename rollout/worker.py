"""What the engine is handed: a worker that turns a batch into emitted tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from rollout.draft_corpus import DraftCorpus
from rollout.memory.cache import CacheMemory
from rollout.types import Batch, Request, StepResult, TokenExtras


class Worker(Protocol):
    """The engine knows nothing else of speculation.

    Every method runs on the engine's thread. ``step`` commits accepted tokens' KV into
    ``memory.req_to_token``; appending tokens to requests is the scheduler's.
    """

    @property
    def memory(self) -> CacheMemory: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def model_dtype(self) -> torch.dtype: ...

    @property
    def is_whole(self) -> bool:
        """Whether the weights are those of one version; else nothing can be served."""
        ...

    @property
    def weight_version(self) -> int: ...

    @property
    def max_draft_tokens(self) -> int:
        """Draft nodes one request may ask for in a step, root excluded."""
        ...

    @property
    def draft_corpus(self) -> DraftCorpus | None:
        """What it drafts from and learns into; None for a worker that has no corpus."""
        ...

    def begin(self, learned: Mapping[str, Any]) -> None:
        """Called once before the first step, with what an earlier engine's worker had learned.

        Called again when a saved corpus is loaded. Raises ValueError for what is none of it.
        """
        ...

    def learned(self) -> dict[str, Any]:
        """JSON-able: what steps cost and drafts are worth, for `begin` and for reports."""
        ...

    def step(self, batch: Batch) -> StepResult: ...

    def release(self, request: Request) -> None:
        """The request ended: forget what was kept for it. Its tokens stay in the corpus."""
        ...

    def score(self, request: Request, output_ids: list[int]) -> tuple[list[float], TokenExtras]:
        """Logprobs of given tokens after the request's own. The request is not queued."""
        ...

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int
    ) -> None: ...

    def counters(self) -> dict[str, float]:
        """The worker's own gauges (corpus size, KV use...), for metrics."""
        ...
