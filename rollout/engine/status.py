"""EngineStatus: an engine's state at the moment of asking, for status pages and monitoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.engine.draft_corpus import ExternalCorpus
from rollout.engine.metrics import EngineMetrics, StepMetrics


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
