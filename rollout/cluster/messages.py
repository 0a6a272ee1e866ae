"""The messages between a cluster and its replicas."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rollout.engine.metrics import EngineMetrics, EngineStatus, StepMetrics
from rollout.scheduler.step_limits import StepLimits
from rollout.types import EmittedTokens, FinishReason, Request, RequestStats, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    request_id: int
    prompt_ids: list[int]
    partial_ids: list[int]  # emitted before, by this replica or another
    params: SamplingParams
    prompt_index: int
    sample_index: int
    seed: int
    is_watched: bool  # its tokens are wanted as they come


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The tokens a request emitted since it was last reported."""

    request_id: int
    tokens: EmittedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that ended on a replica."""

    growth: Growth  # the last tokens
    finish_reason: FinishReason
    error: str | None
    stats: RequestStats  # of its life on this replica
    routed_experts: NDArray[np.integer] | None = None  # of all its tokens but the last


@dataclass(kw_only=True, slots=True)
class ClusterMetrics(EngineMetrics):
    """The metrics of engines in other processes at one moment, their memory read there."""

    memory_bytes: int = 0

    @property
    def peak_memory_bytes(self) -> int:
        """Peak resident memory of their processes, added up."""
        return self.memory_bytes

    @classmethod
    def of(cls, metrics: EngineMetrics) -> Self:
        """A copy of an engine's metrics, with the peak memory of its process, which is this one."""
        counters = {each.name: getattr(metrics, each.name) for each in fields(EngineMetrics)}
        return cls(**counters, memory_bytes=metrics.peak_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A replica's report, sent every few milliseconds while it has something to say."""

    grown: list[Growth]
    ended: list[Ended]
    total: ClusterMetrics
    last_step: StepMetrics
    status: EngineStatus | None  # once in a while
    serial: int  # of the latest sync before it


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    value: Any
    error: Exception | None
    unavailable_reason: str  # of the engine, after it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Facts about a replica that never change and are the same on all."""

    vocab_size: int
    limits: StepLimits
    max_context_len: int
    max_sequence_len: int  # tokens of one request that its KV slots can hold
    eos_token_ids: tuple[int, ...]
    records_routes: bool


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request, from `submit` until it ended, over all the replicas that had it."""

    request: Request  # grows with what is reported
    deaths: int = 0  # of replicas that had it
    is_watched: bool = False  # somebody looks at its tokens as they come
    is_alone: bool = False  # its replica is given nothing else

    def submission(self) -> Submission:
        """The rest of the request, which continues after the tokens that are known here."""
        request = self.request
        prompt_len = request.prompt_len - request.partial_len
        return Submission(
            request_id=request.request_id,
            prompt_ids=request.tokens[:prompt_len],
            partial_ids=request.tokens[prompt_len:],
            params=request.params,
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            seed=request.seed,
            is_watched=self.is_watched,
        )

    def grow(self, growth: Growth) -> None:
        request, tokens = self.request, growth.tokens
        request.tokens += tokens.token_ids
        request.logprobs += tokens.logprobs
        request.weight_versions += tokens.weight_versions
        request.extras.extend(tokens.extras)

    def end(self, ended: Ended) -> None:
        self.grow(ended.growth)
        self.request.finish_reason = ended.finish_reason
        self.request.error = ended.error
        self.request.stats = ended.stats
        self.request.routed_experts = ended.routed_experts
