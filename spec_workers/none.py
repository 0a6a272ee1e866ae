"""Plain decoding: a draft of nothing but the root."""

from __future__ import annotations

from rollout.config import EngineConfig
from rollout.models.checkpoint import Progress
from spec_workers.spec_worker import SpecWorker
from spec_workers.target import TargetWorker


class PlainWorker(SpecWorker):
    """Proposes nothing: each step emits one token per request."""


def build(config: EngineConfig, progress: Progress | None = None) -> PlainWorker:
    """A worker without drafts. It has no options."""
    return PlainWorker(TargetWorker(config, progress, draft_nodes=0))
