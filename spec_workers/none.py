"""Plain decoding: a draft of nothing but the root."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.config import EngineConfig
from rollout.models.checkpoint import Progress
from rollout.types import Batch, DraftTrees
from spec_workers.draft_tree import only_roots
from spec_workers.spec_worker import SpecWorker
from spec_workers.target import TargetWorker


class PlainWorker(SpecWorker):
    """Proposes nothing: each step emits one token per request."""

    supports_overlap = True

    def propose(self, batch: Batch, floors_B: NDArray[np.float64]) -> DraftTrees:
        return only_roots(len(batch.entries))


def build(config: EngineConfig, progress: Progress | None = None) -> PlainWorker:
    """A worker without drafts. It has no options."""
    return PlainWorker(TargetWorker(config, progress, draft_nodes=0))
