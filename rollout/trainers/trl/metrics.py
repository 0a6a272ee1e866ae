"""What drafts brought, in the log of a trainer of TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.engine.protocol import Engine
from rollout.types import Rollout


class DraftMetrics:
    """Adds to what a trainer logs next, which it averages over the batches since it last did:

    - ``specrollout/accept_length``: tokens per forward of the model;
    - ``specrollout/saved_seconds``: the time that drafts saved over plain decoding, of several
      replicas the mean. Left out where nothing measures it.

    Both are those of the trainer's main process, the one that logs.
    """

    def __init__(self, engine: Engine | None) -> None:
        """``engine``: None if others use it too: then saved time is unknown."""
        self._engine = engine
        self._saved_seconds = 0.0  # so far

    def add(self, trainer: Any, rollouts: Sequence[Rollout]) -> None:
        """Add those of a batch that has just been generated."""
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        if steps := sum(each.stats.verify_steps for each in rollouts):
            accepted = sum(each.stats.accepted for each in rollouts)
            metrics["specrollout/accept_length"].append((steps + accepted) / steps)
        if self._engine is None:
            return
        status = self._engine.status()
        if status.total.forecast_steps:
            saved = status.total.saved_seconds / max(1, len(status.replicas))
            metrics["specrollout/saved_seconds"].append(saved - self._saved_seconds)
            self._saved_seconds = saved
