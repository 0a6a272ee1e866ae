"""Metrics of drafts in the log of verl's trainer.

verl's current trainer reads the counters of responses for its own MTP alone, and its asynchronous
client drops them. It has no extension point for metrics of servers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from statistics import fmean
from typing import Any

import ray

_TRAINER = "verl.trainer.ppo.v1.trainer_base"


class DraftMetrics:
    """Metrics of drafts since the last call, on all servers together:

    - ``specrollout/accept_length``: tokens per forward of the model;
    - ``specrollout/saved_seconds``: the time that drafts saved over plain decoding, the mean of the
      servers. Left out where nothing measures it.

    Rollouts of validation count too.
    """

    def __init__(self) -> None:
        self._tokens = self._forwards = 0
        self._saved_seconds = 0.0

    def take(self, servers: Sequence[Any]) -> dict[str, float]:
        """``servers``: Ray's handles of them, the same ones in every call."""
        totals = ray.get([server.metrics.remote() for server in servers])
        tokens = sum(each.generated_tokens for each in totals)
        forwards = sum(each.target_forwards for each in totals)
        metrics = {}
        if forwards > self._forwards:
            accept_length = (tokens - self._tokens) / (forwards - self._forwards)
            metrics["specrollout/accept_length"] = accept_length
        self._tokens, self._forwards = tokens, forwards
        if any(each.forecast_steps for each in totals):
            saved = fmean(each.saved_seconds for each in totals)
            metrics["specrollout/saved_seconds"] = saved - self._saved_seconds
            self._saved_seconds = saved
        return metrics


def log_with_trainer() -> None:
    """Have verl's trainer, if this is its process, log the metrics with those of each step.

    verl's older trainer logs the counters of responses by itself.
    """
    if _TRAINER not in sys.modules:
        return
    trainer_class = sys.modules[_TRAINER].PPOTrainer
    consume = trainer_class._consume_sync_metrics  # called once at the end of each step
    if hasattr(consume, "__wrapped__"):
        return
    drafts = DraftMetrics()

    @wraps(consume)
    def consume_with_drafts(trainer: Any) -> dict[str, float]:
        managers = trainer._rollout_server_managers()
        servers = [server for manager in managers for server in manager.server_handles]
        return consume(trainer) | drafts.take(servers)

    trainer_class._consume_sync_metrics = consume_with_drafts
