"""The data of logs: their runs, each from the start of its own generation."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Columns = dict[str, np.ndarray]
"""float64 arrays of one length by name; NaN where a line has no value."""


class ColumnsBuilder:
    """Collects lines into columns, at 8 bytes per number: a log may have very many lines."""

    def __init__(self, names: Iterable[str]) -> None:
        self._values = {name: array("d") for name in names}

    def add(self, line: Mapping[str, Any]) -> None:
        for name, values in self._values.items():
            values.append(number(line.get(name)))

    def columns(self) -> Columns:
        """Copies of the columns so far."""
        return {name: np.array(values, dtype=np.float64) for name, values in self._values.items()}


_LARGEST = 1e15  # of what a run counts; more is damage, and would overflow sums


def number(value: object) -> float:
    """``value`` as a float; NaN for anything that is no figure of a run."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    try:
        result = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return float("nan")
    return result if abs(result) <= _LARGEST else float("nan")


def total(values: np.ndarray) -> float:
    """The sum, ignoring NaN; 0 without values."""
    return float(np.nansum(values))


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None where ``whole`` is 0."""
    return part / whole if whole else None


STEP_FIELDS = (
    "time",
    "step",
    "running",
    "query_tokens",
    "sampling",
    "generated_tokens",
    "proposed",
    "drafted",
    "accepted",
    "expected_accepted",
    "schedule_ms",
    "draft_ms",
    "forward_ms",
    "sample_ms",
    "total_ms",
    "saved_seconds",
    "saved_error_seconds",
    "preemptions",
    "peak_memory_bytes",
)
ROLLOUT_FIELDS = (
    "time",
    "step",
    "prompt_index",
    "sample_index",
    "prompt_tokens",
    "generated_tokens",
    "preemptions",
    "verify_steps",
    "proposed",
    "drafted",
    "accepted",
    "expected_accepted",
)


@dataclass(kw_only=True, slots=True)
class Run:
    """The log of one run. Seconds count from the start of its generation."""

    path: Path
    number: int  # from 1, in the order of the file
    name: str = ""  # in legends: how it differs from the other runs of a report
    settings: Mapping[str, Any] = field(default_factory=dict)
    step_seconds: np.ndarray  # [steps] when each ended; non-decreasing
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
        """Logged steps; `log.every` may have left others out."""
        return len(self.step_seconds)

    @property
    def steps_per_line(self) -> float:
        """Steps per logged step: 1 unless `log.every` left some out."""
        numbers = self.steps["step"][np.isfinite(self.steps["step"])]
        return float(numbers[-1] - numbers[0]) / (len(numbers) - 1) if len(numbers) > 1 else 1.0

    @property
    def num_rollouts(self) -> int:
        """Logged rollouts."""
        return len(self.ended_seconds)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last logged event."""
        known = self.ended_seconds[np.isfinite(self.ended_seconds)]
        return float(max([*self.step_seconds[-1:], *known[-1:]], default=0.0))

    @property
    def num_replicas(self) -> int:
        """Engines side by side, whose times the counters add up."""
        known = number(self.settings.get("replicas"))
        return int(known) if known >= 1 else 1

    def accept_length(self, index: int) -> float | None:
        """Tokens per target forward of a rollout; None where unknown."""
        forwards = float(self.rollouts["verify_steps"][index])
        return ratio(forwards + float(self.rollouts["accepted"][index]), forwards)


MAX_BINS = 120
"""Points of a line that stands for many steps."""


class Bins:
    """Consecutive steps of one run in at most ``MAX_BINS`` bins of nearly equal size."""

    def __init__(self, run: Run) -> None:
        assert run.num_steps, "a run without steps has no bins"
        num_bins = min(MAX_BINS, run.num_steps)
        self._starts = np.arange(num_bins) * run.num_steps // num_bins
        self.last = np.append(self._starts[1:] - 1, run.num_steps - 1)  # [bins] indices of steps
        self.ends = run.step_seconds[self.last]

    def total(self, values: np.ndarray) -> np.ndarray:
        """[bins] sums, ignoring NaN."""
        return np.add.reduceat(np.nan_to_num(values), self._starts)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """[bins] means, ignoring NaN; NaN for a bin without values."""
        return self.ratio(values, np.isfinite(values).astype(float))

    def ratio(self, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """[bins] sum of ``part`` over sum of ``whole``; NaN where the latter is 0."""
        wholes = self.total(whole)
        return np.where(wholes > 0, self.total(part) / np.where(wholes > 0, wholes, 1.0), np.nan)


@dataclass(kw_only=True, slots=True)
class Log:
    runs: list[Run]  # at least one
    num_unreadable: int = 0  # lines
    num_left_out: int = 0  # runs
