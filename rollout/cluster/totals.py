"""One engine's numbers from those of many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

from rollout.engine.metrics import EngineMetrics, StepMetrics


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
        """A copy, of this process's engine."""
        counters = {each.name: getattr(metrics, each.name) for each in fields(EngineMetrics)}
        return cls(**counters, memory_bytes=metrics.peak_memory_bytes)


def sum_of_metrics(each: Iterable[ClusterMetrics]) -> ClusterMetrics:
    """Counters and times added up; the first rollout is the first of any."""
    total = ClusterMetrics()
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


_COUNTERS = [
    field.name for field in fields(ClusterMetrics) if field.name != "first_rollout_seconds"
]
_STEP_LARGEST = [
    field.name
    for field in fields(StepMetrics)
    if field.name == "weight_version" or field.name.endswith("_ms")
]
_STEP_COUNTS = [
    field.name for field in fields(StepMetrics) if field.name not in ("step", *_STEP_LARGEST)
]
