"""The protocol of a worker, which turns a batch into emitted tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from rollout.engine.draft_corpus import DraftCorpus
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.parallel import ModelRanks
from rollout.runner.memory_saver import MemorySaver
from rollout.scheduler.step_limits import StepLimits
from rollout.types import Batch, Request, StepResult, TokenExtras
from rollout.weights.transaction import WeightTransaction


class Worker(Protocol):
    """The protocol of a speculative worker: all that the engine knows of speculation.

    Every method runs on the engine's thread. Appending tokens to requests is the scheduler's.
    """

    @property
    def memory(self) -> KVCacheManager: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def model_dtype(self) -> torch.dtype: ...

    @property
    def model_device(self) -> torch.device: ...

    @property
    def limits(self) -> StepLimits:
        """The limits of what the scheduler may give the worker in one step."""
        ...

    @property
    def weights(self) -> WeightTransaction:
        """The weights of every model it runs, target and drafts: where updates begin and end."""
        ...

    @property
    def memory_saver(self) -> MemorySaver:
        """The memory of the same models, and of their KV."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Draft nodes one request may ask for in a step, root excluded."""
        ...

    @property
    def draft_corpus(self) -> DraftCorpus | None:
        """The corpus it drafts from and learns into; None for a worker without one."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether other ranks wait in its models' forwards: then every step, one of no requests
        too, enters the same forwards, and the engine steps with nothing to do."""
        ...

    @property
    def ranks(self) -> ModelRanks:
        """The processes that run its models."""
        ...

    def calibrate(self) -> None:
        """Learn what forwards cost by timing some. Called once, before the first step."""
        ...

    def learned(self) -> dict[str, Any]:
        """The learned costs and values of drafts, JSON-able, for reports."""
        ...

    def without_speculation(self) -> AbstractContextManager[Worker]:
        """A worker of the same models, memory and weights, which drafts and learns nothing.

        For while the context lasts, which this worker sits out; no request may live across its
        ends.
        """
        ...

    def step(self, batch: Batch) -> StepResult:
        """Run a step: emit tokens, and commit accepted ones' KV into ``memory.req_to_token``.

        A step that raises leaves nothing behind but reserved slots.
        """
        ...

    def release(self, request: Request) -> None:
        """The request ended: forget what was kept for it. Its tokens stay in the corpus."""
        ...

    def score(
        self,
        request: Request,
        output_ids: list[int],
        observe: Callable[[torch.Tensor], object] | None = None,
    ) -> tuple[list[float], TokenExtras]:
        """Logprobs of given tokens after the request's own. The request is not queued.
        ``observe``: called with the logits [R, V] of their rows, block by block.

        Raises OutOfMemoryError before anything is computed.
        """
        ...

    def score_idle(self) -> None:
        """Enter the forwards of `score` with nothing to score, where this rank's call is refused:
        ranks in lockstep wait for it."""
        ...

    def weights_changed(self) -> None:
        """Called when an update has been committed, before the next step."""
        ...

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise IntegrityError if memory, drafts' KV or the corpus contradict themselves.

        Called between two steps. ``running``: the requests that have slots.
        """
        ...

    def counters(self) -> dict[str, float]:
        """The worker's own gauges (corpus size, KV use...), for metrics."""
        ...
