"""One run of a log, and the runs of a log on one axis of generating time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollout.report.columns import Columns

STEP_FIELDS = (
    "time",
    "step",
    "running",
    "waiting",
    "query_tokens",
    "sampling",
    "generated_tokens",
    "proposed",
    "drafted",
    "accepted",
    "expected_accepted",
    "predicted_ms",
    "plain_ms",
    "predicted_gain_ms",
    "gain_ms",
    "schedule_ms",
    "draft_ms",
    "forward_ms",
    "sample_ms",
    "total_ms",
    "preemptions",
    "peak_memory_bytes",
)
ROLLOUT_FIELDS = (
    "time",
    "step",
    "request_id",
    "prompt_index",
    "sample_index",
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "preemptions",
    "verify_steps",
    "proposed",
    "drafted",
    "accepted",
    "expected_accepted",
    "predicted_ms",
    "total_ms",
    "predicted_gain_ms",
    "gain_ms",
)


@dataclass(kw_only=True, slots=True)
class Run:
    """The log of one run. Seconds count from when it began to generate."""

    number: int  # from 1, in the order of the file
    settings: Mapping[str, Any] = field(default_factory=dict)
    offset: float = 0.0  # seconds for which the runs before it generated
    step_seconds: np.ndarray  # [steps] when each ended; never decreasing
    steps: Columns  # STEP_FIELDS
    rollouts: Columns  # ROLLOUT_FIELDS
    began_seconds: np.ndarray  # [rollouts] when each was first verified; NaN where unknown
    ended_seconds: np.ndarray  # [rollouts]
    groups: list[str]  # [rollouts] a key that the samples of a prompt share
    finish_reasons: list[str]  # [rollouts]
    learned: Mapping[str, Any] = field(default_factory=dict)  # the latest
    totals: Mapping[str, Any] = field(default_factory=dict)  # the latest

    @property
    def num_steps(self) -> int:
        """Logged ones; `log.every` may have left others out."""
        return len(self.step_seconds)

    @property
    def steps_per_line(self) -> float:
        """Steps that each logged one stands for: 1 unless `log.every` left some out."""
        numbers = self.steps["step"][np.isfinite(self.steps["step"])]
        return float(numbers[-1] - numbers[0]) / (len(numbers) - 1) if len(numbers) > 1 else 1.0

    @property
    def num_rollouts(self) -> int:
        return len(self.ended_seconds)

    @property
    def seconds(self) -> float:
        """From the start to the last thing logged."""
        known = self.ended_seconds[np.isfinite(self.ended_seconds)]
        return float(max([*self.step_seconds[-1:], *known[-1:]], default=0.0))

    @property
    def step_ms(self) -> np.ndarray:
        """[steps] what `predicted_ms` foretells: drafting, forward and sampling."""
        return self.steps["total_ms"] - np.nan_to_num(self.steps["schedule_ms"])

    @property
    def has_forecast(self) -> np.ndarray:
        """[steps] bool: its time was predicted; 0 is written where nothing is known."""
        return (np.nan_to_num(self.steps["predicted_ms"]) > 0) & np.isfinite(self.step_ms)


@dataclass(kw_only=True, slots=True)
class Log:
    path: Path
    runs: list[Run]  # at least one
    num_unreadable: int = 0  # lines

    def only(self, run: Run) -> Log:
        """The log as if it held but this run."""
        return replace(self, runs=[replace(run, offset=0.0)])
