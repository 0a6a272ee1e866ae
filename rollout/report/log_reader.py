"""Reads a log, complete or not, and works out the times of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollout.errors import InvalidInputError
from rollout.report.run import (
    ROLLOUT_FIELDS,
    STEP_FIELDS,
    Columns,
    ColumnsBuilder,
    Log,
    Run,
    number,
)


class Timeline:
    """The times of one run's steps. Without logged times, their durations are summed up."""

    def __init__(self, steps: Columns, started: float) -> None:
        """``started``: Unix seconds; NaN: the first step's duration before its logged time."""
        self._known = np.flatnonzero(np.isfinite(steps["step"]))
        self._numbers = steps["step"][self._known]
        self._step_ms = np.nan_to_num(steps["total_ms"])
        times = steps["time"]
        has_time = np.flatnonzero(np.isfinite(times))
        if np.isnan(started) and len(has_time):
            started = times[has_time[0]] - self._step_ms[has_time[0]] / 1e3
        self._started = started
        if len(has_time):
            # Times must not run backwards if the clock was set back.
            elapsed = np.fmax.accumulate(times - started)
            self.step_seconds = np.maximum(np.nan_to_num(elapsed), 0.0)
        else:
            self.step_seconds = np.cumsum(self._step_ms) / 1e3

    def ended(self, rollouts: Columns) -> np.ndarray:
        """[rollouts] end of each in seconds; NaN where unknown."""
        by_clock = np.maximum(rollouts["time"] - self._started, 0.0)
        return np.where(np.isfinite(by_clock), by_clock, self._at_step(rollouts["step"]))

    def began(self, rollouts: Columns) -> np.ndarray:
        """[rollouts] begin of the first target forward of each, in seconds; NaN where unknown.

        It assumes that the rollout took part in every step; a preempted one began earlier.
        """
        first_step = rollouts["step"] - rollouts["verify_steps"] + 1
        began = self._at_step(first_step, begin=True)
        return np.where(rollouts["verify_steps"] > 0, began, np.nan)

    def _at_step(self, numbers: np.ndarray, *, begin: bool = False) -> np.ndarray:
        """Seconds at which these steps, or the next logged ones, ended (or began)."""
        if not len(self._known):
            return np.full(len(numbers), np.nan)
        indices = np.searchsorted(self._numbers, np.nan_to_num(numbers, nan=np.inf))
        steps = self._known[np.minimum(indices, len(self._known) - 1)]
        seconds = self.step_seconds[steps]
        if begin:
            seconds = np.maximum(seconds - self._step_ms[steps] / 1e3, 0.0)
        return np.where(np.isfinite(numbers), seconds, np.nan)


_KINDS = ("run", "step", "rollout", "learned", "totals")


def read_log(path: Path) -> Log:
    """All runs of the log at ``path``.

    Torn lines and lines of an unknown kind are counted and left out. A value that should be a
    number and is not becomes NaN. Raises InvalidInputError if the file cannot be read or holds no
    line of a log.
    """
    runs: list[_OpenRun] = []
    num_unreadable = num_lines = 0
    try:
        with path.open("rb") as file:
            for text in file:
                if not text.strip():
                    continue
                num_lines += 1
                line = _parse(text)
                if line is None:
                    num_unreadable += 1
                    continue
                if not runs or runs[-1].ends_before(line):
                    runs.append(_OpenRun())
                runs[-1].add(line)
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise InvalidInputError("log", str(path), f"cannot be read: {reason}") from None
    if not runs:
        found = "none of its lines is of one" if num_lines else "it is empty"
        raise InvalidInputError(
            "log",
            str(path),
            f"is not the log of a run, {found}: give a job's <output>.log",
        )
    with_lines = [run for run in runs if run.num_lines] or runs[
        -1:
    ]  # a run that stopped at once has none
    closed = [run.close(path, number) for number, run in enumerate(with_lines, start=1)]
    return Log(runs=closed, num_unreadable=num_unreadable)


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    if "kind" not in line and "step" in line and "total_ms" in line:
        line["kind"] = "step"  # a log of steps alone has no kinds
    return line if line.get("kind") in _KINDS else None


class _OpenRun:
    """A run whose lines are being read."""

    def __init__(self) -> None:
        self.num_lines = 0  # without the line that begins the run
        self._settings: Mapping[str, Any] | None = None
        self._learned: Mapping[str, Any] = {}
        self._totals: Mapping[str, Any] = {}
        self._steps = ColumnsBuilder(STEP_FIELDS)
        self._rollouts = ColumnsBuilder(ROLLOUT_FIELDS)
        self._groups: list[str] = []
        self._finish_reasons: list[str] = []
        self._last_step = float("-inf")

    def ends_before(self, line: Mapping[str, Any]) -> bool:
        """Whether ``line`` begins another run: it says so, or it counts steps from the start."""
        match line["kind"]:
            case "run":
                return self._settings is not None or self.num_lines > 0
            case "step":
                return number(line.get("step")) <= self._last_step
            case _:
                return False

    def add(self, line: Mapping[str, Any]) -> None:
        match line["kind"]:
            case "run":
                self._settings = line
                return
            case "step":
                self._steps.add(line)
                step = number(line.get("step"))
                self._last_step = max(self._last_step, step) if step == step else self._last_step
            case "rollout":
                self._rollouts.add(line)
                self._groups.append(str(line.get("group", line.get("prompt_index", ""))))
                self._finish_reasons.append(str(line.get("finish_reason") or "unknown"))
            case "learned":
                self._learned = _without_stamp(line)
            case "totals":
                self._totals = _without_stamp(line)
        self.num_lines += 1

    def close(self, path: Path, run_number: int) -> Run:
        steps, rollouts = self._steps.columns(), self._rollouts.columns()
        settings = self._settings or {}
        times = Timeline(steps, number(settings.get("time")))
        return Run(
            path=path,
            number=run_number,
            settings=settings,
            step_seconds=times.step_seconds,
            steps=steps,
            rollouts=rollouts,
            began_seconds=times.began(rollouts),
            ended_seconds=times.ended(rollouts),
            groups=self._groups,
            finish_reasons=self._finish_reasons,
            learned=self._learned,
            totals=self._totals,
        )


def _without_stamp(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("kind", "time")}
