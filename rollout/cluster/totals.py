"""One engine's numbers from those of many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from rollout.engine_metrics import EngineMetrics, StepMetrics

_OWN = ("first_rollout_seconds",)


def sum_of_metrics(each: Iterable[EngineMetrics]) -> EngineMetrics:
    """Counters and times added up; the first rollout is the first of any."""
    total = EngineMetrics()
    firsts = []
    for metrics in each:
        for name in _COUNTERS:
            setattr(total, name, getattr(total, name) + getattr(metrics, name))
        if metrics.first_rollout_seconds is not None:
            firsts.append(metrics.first_rollout_seconds)
    total.first_rollout_seconds = min(firsts, default=None)
    return total


def sum_of_steps(step: int, each: Iterable[StepMetrics]) -> StepMetrics:
    """Replicas step side by side: what they did is added up, of times and versions the largest."""
    total = StepMetrics(step=step)
    for metrics in each:
        for name in _STEP_COUNTS:
            setattr(total, name, getattr(total, name) + getattr(metrics, name))
        for name in _STEP_LARGEST:
            setattr(total, name, max(getattr(total, name), getattr(metrics, name)))
    return total


_COUNTERS = [field.name for field in fields(EngineMetrics) if field.name not in _OWN]
_STEP_LARGEST = [
    field.name
    for field in fields(StepMetrics)
    if field.name == "weight_version" or field.name.endswith("_ms")
]
_STEP_COUNTS = [
    field.name for field in fields(StepMetrics) if field.name not in ("step", *_STEP_LARGEST)
]
