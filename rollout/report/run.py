"""One run of a log, the runs of a log on one axis of generating time, and their numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

MAX_BINS = 300

Columns = dict[str, np.ndarray]
"""float64 arrays of one length, NaN where a line does not say."""


class ColumnsBuilder:
    """Takes lines in and keeps 8 bytes per number, for a log may have very many."""

    def __init__(self, names: Iterable[str]) -> None:
        self._values = {name: array("d") for name in names}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the numbers of a line; NaN where it has none."""
        for name, values in self._values.items():
            values.append(number(line.get(name)))

    def columns(self) -> Columns:
        return {name: np.array(values, dtype=np.float64) for name, values in self._values.items()}


def number(value: object) -> float:
    """``value`` as a finite float; NaN for everything else JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    try:
        result = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return float("nan")
    return result if abs(result) != float("inf") else float("nan")


def total(values: np.ndarray) -> float:
    """The sum of what is known; 0 where nothing is."""
    return float(np.nansum(values))


def ratio(part: float, whole: float) -> float | None:
    """None where the whole is nothing."""
    return part / whole if whole else None


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
    """The runs of a log file."""

    path: Path
    runs: list[Run]  # at least one
    num_unreadable: int = 0  # lines

    def only(self, run: Run) -> Log:
        """The log as if it held but this run."""
        return replace(self, runs=[replace(run, offset=0.0)])


class Bins:
    """Consecutive steps of one run in groups of (nearly) equal number, at least one each.

    A plot of a hundred thousand steps has no more points than pixels.
    """

    def __init__(self, run: Run, most: int = MAX_BINS) -> None:
        assert run.num_steps, "a run without steps has no bins"
        num_bins = min(max(most, 1), run.num_steps)
        self._starts = np.arange(num_bins) * run.num_steps // num_bins
        self.ends = run.offset + run.step_seconds[[*(self._starts[1:] - 1), run.num_steps - 1]]

    def total(self, values: np.ndarray) -> np.ndarray:
        """[bins] sums of what is known."""
        return np.add.reduceat(np.nan_to_num(values), self._starts)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """[bins] of what is known; NaN where nothing is."""
        known = self.total(np.isfinite(values).astype(float))
        return np.where(known > 0, self.total(values) / np.maximum(known, 1), np.nan)

    def ratio(self, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """[bins] sum by sum; NaN where the whole is nothing."""
        wholes = self.total(whole)
        return np.where(wholes > 0, self.total(part) / np.where(wholes > 0, wholes, 1.0), np.nan)

    def median(self, values: np.ndarray) -> np.ndarray:
        """[bins] of what is known, which a few odd steps do not move; NaN where nothing is."""
        parts = np.split(values, self._starts[1:])
        known = [part[np.isfinite(part)] for part in parts]
        return np.array([np.median(part) if len(part) else np.nan for part in known])
