"""Counters of the engine: of the latest step and of its whole life, and its status at a moment."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.engine.draft_corpus import ExternalCorpus
from rollout.engine.speedup import HALF_INTERVAL, MIN_STEPS, PlainPace, Saving
from rollout.types import Batch, Rollout, StepForecast, StepResult


@dataclass(kw_only=True, slots=True)
class StepMetrics:
    step: int = 0
    running: int = 0
    waiting: int = 0
    query_tokens: int = 0  # rows of the forward, draft nodes included
    sampling: int = 0  # entries that sampled
    generated_tokens: int = 0
    proposed: int = 0  # draft nodes that the worker proposed
    drafted: int = 0  # proposed nodes that were verified
    accepted: int = 0
    expected_accepted: float = 0.0  # `accepted`, as expected by the drafts' estimates
    predicted_ms: float = 0.0  # draft, forward and sampling by the cost curve; 0: not known
    plain_ms: float = 0.0  # the same forecast of the step without drafts; 0: not known
    predicted_gain_ms: float = 0.0  # expected extra time of plain decoding for the same tokens
    gain_ms: float = 0.0  # that extra time by accepted nodes and the measured times of steps
    schedule_ms: float = 0.0
    draft_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    total_ms: float = 0.0
    weight_version: int = 0
    kv_used: int = 0
    kv_cached: int = 0
    cached_tokens: int = 0  # tokens of requests admitted in this step that were cached

    @property
    def accept_length(self) -> float:
        """Tokens emitted per target forward of a request in this step."""
        return self.generated_tokens / self.sampling if self.sampling else 0.0


@dataclass(kw_only=True, slots=True)
class EngineMetrics:
    """Totals since the engine was made, or since `reset`."""

    steps: int = 0
    target_forwards: int = 0  # per request: steps in which it was sampled from
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    proposed: int = 0
    drafted: int = 0
    accepted: int = 0
    expected_accepted: float = 0.0
    finished: int = 0
    preemptions: int = 0
    schedule_ms: float = 0.0
    draft_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    total_ms: float = 0.0
    forecast_steps: int = 0  # whose cost was predicted
    plain_forecasts: int = 0  # steps of plain decoding among them
    drafting_forecasts: int = 0  # steps that verified drafts among them
    predicted_gain_ms: float = 0.0  # expected extra time of plain decoding
    gain_ms: float = 0.0  # that extra time by accepted nodes and the pace of plain steps between
    gain_variance_ms2: float = 0.0  # the squared standard error of `gain_ms`
    first_rollout_seconds: float | None = None  # engine time until the first rollout finished
    kv_slots: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens emitted per target forward of a request, the target's own included."""
        return self.generated_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def saved_seconds(self) -> float:
        """The seconds that plain decoding would have taken longer, by the pace of the plain steps
        between drafting ones."""
        return self.gain_ms / 1e3

    @property
    def saved_error_seconds(self) -> float:
        """Half of the 95 % interval of `saved_seconds`; infinite after too few steps."""
        if min(self.plain_forecasts, self.drafting_forecasts) < MIN_STEPS:
            return math.inf
        return HALF_INTERVAL * math.sqrt(self.gain_variance_ms2) / 1e3

    def saving(self, run_seconds: float, replicas: int) -> Saving:
        """The time that drafts saved of a run, where so many replicas side by side are added up."""
        saved, error = self.saved_seconds / replicas, self.saved_error_seconds / replicas
        return Saving(saved, error, run_seconds)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak resident memory of the process."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class MetricsRecorder:
    def __init__(self, kv_slots: int) -> None:
        self.total = EngineMetrics(kv_slots=kv_slots)
        self.last = StepMetrics()
        self._pace = PlainPace()

    def reset(self) -> None:
        self.total = EngineMetrics(kv_slots=self.total.kv_slots)
        self._pace = PlainPace()

    def record(
        self, batch: Batch, result: StepResult, step: StepMetrics, ended: list[Rollout]
    ) -> None:
        """Add one step; ``step`` comes with what only the engine knows filled in.

        ``ended``: the rollouts handed out with it.
        """
        times = result.times
        step.step = batch.step
        step.query_tokens = result.num_query_tokens
        step.proposed = result.num_proposed
        step.expected_accepted = result.expected_accepted
        emitted = [len(entry.token_ids) for entry in result.entries]
        step.sampling = len(emitted) - emitted.count(0)  # whoever samples emits at least one
        step.generated_tokens = sum(emitted)
        step.drafted = sum([entry.num_drafted for entry in result.entries])
        step.accepted = sum([len(entry.path) for entry in result.entries])
        step.schedule_ms, step.draft_ms = times.schedule, times.draft
        step.forward_ms, step.sample_ms, step.total_ms = times.forward, times.sample, times.total
        step.weight_version = result.weight_version
        decodes_alone = batch.num_run_tokens == step.sampling
        if result.forecast is not None:
            self._book_gain(step, result.forecast, decodes_alone=decodes_alone)
        self._accumulate(step)
        for rollout in ended:
            self._finish(rollout)
        self.last = step

    def _book_gain(self, step: StepMetrics, forecast: StepForecast, *, decodes_alone: bool) -> None:
        """Book the milliseconds that drafts saved in this step, by the pace of the plain steps
        beside it."""
        pace = self._pace
        step.predicted_ms, step.plain_ms = forecast.predicted_ms, forecast.plain_ms
        step.predicted_gain_ms = forecast.predicted_gain_ms
        took_ms = pace.bounded(step.total_ms - step.schedule_ms, forecast.predicted_ms)
        self.total.plain_forecasts += decodes_alone and not step.drafted
        self.total.drafting_forecasts += step.drafted > 0
        if not step.drafted:
            # All that can be lost in it is the time of proposing what was not verified.
            step.gain_ms = -pace.ratio * max(0.0, forecast.predicted_ms - forecast.plain_ms)
            if decodes_alone:
                step.gain_ms += pace.observe(took_ms, forecast.predicted_ms)
        else:
            saved_ms = forecast.plain_ms
            saved_ms += forecast.decode_ms * step.accepted / max(1, step.sampling)
            if not decodes_alone:
                # A step with prefill is predicted less well than what drafts gain or lose in it.
                saved_ms, took_ms = saved_ms - forecast.predicted_ms, 0.0
            step.gain_ms = pace.record_saved(saved_ms) - took_ms
        self.total.gain_variance_ms2 = pace.variance_ms2

    def _finish(self, rollout: Rollout) -> None:
        total = self.total
        if total.first_rollout_seconds is None:
            total.first_rollout_seconds = total.total_ms / 1e3
        total.finished += 1
        total.prompt_tokens += len(rollout.prompt_ids)
        total.cached_tokens += rollout.stats.cached_tokens
        total.preemptions += rollout.stats.preemptions

    def _accumulate(self, step: StepMetrics) -> None:
        total = self.total
        total.steps += 1
        total.target_forwards += step.sampling
        total.forecast_steps += step.predicted_ms > 0
        total.generated_tokens += step.generated_tokens
        total.proposed += step.proposed
        total.drafted += step.drafted
        total.accepted += step.accepted
        total.expected_accepted += step.expected_accepted
        total.predicted_gain_ms += step.predicted_gain_ms
        total.gain_ms += step.gain_ms
        total.schedule_ms += step.schedule_ms
        total.draft_ms += step.draft_ms
        total.forward_ms += step.forward_ms
        total.sample_ms += step.sample_ms
        total.total_ms += step.total_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The status of one engine, or the sum over a cluster's replicas; a copy that never changes."""

    running: int
    waiting: int
    kv_slots: int
    kv_used: int  # by running requests
    kv_cached: int  # in the prefix cache
    unavailable_reason: str  # no step can run; empty when one can
    weight_versions: Mapping[str, int]  # by part: target, draft, ...
    total: EngineMetrics
    last_step: StepMetrics
    counters: Mapping[str, float]  # the worker's own
    learned: Mapping[str, Any]  # JSON-able: the cost curve, what drafts are worth, ...
    corpora: tuple[ExternalCorpus, ...] = ()
    corpus_tokens: int | None = None  # that drafts are made from; None without a corpus
    replicas: Mapping[str, EngineStatus] = field(default_factory=dict)  # by name; of a cluster
