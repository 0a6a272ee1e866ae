"""Plain decoding: a draft of nothing but the root."""

from __future__ import annotations

from rollout.config import EngineConfig
from rollout.models.checkpoint import Progress
from spec_workers.spec_worker import SpecWorker
from spec_workers.target import TargetWorker


class PlainWorker(SpecWorker):
    """Proposes nothing: each step emits one token per request."""


def build(config: EngineConfig, progress: Progress | None = None) -> PlainWorker | TargetWorker:
    """A worker without drafts; of a rank that follows, its target. It has no options."""
    target = TargetWorker(config, progress, draft_nodes=0)
    return target if target.follows else PlainWorker(target)
