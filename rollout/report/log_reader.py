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
                if not runs or line["kind"] == "run":
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
    return line if line.get("kind") in _KINDS else None


class _OpenRun:
    def __init__(self) -> None:
        self.num_lines = 0  # without the line that begins the run
        self._settings: Mapping[str, Any] = {}
        self._learned: Mapping[str, Any] = {}
        self._totals: Mapping[str, Any] = {}
        self._steps = ColumnsBuilder(STEP_FIELDS)
        self._rollouts = ColumnsBuilder(ROLLOUT_FIELDS)
        self._groups: list[str] = []
        self._finish_reasons: list[str] = []

    def add(self, line: Mapping[str, Any]) -> None:
        match line["kind"]:
            case "run":
                self._settings = line
                return
            case "step":
                self._steps.add(line)
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
        started = number(self._settings.get("time"))
        # Times must not run backwards if the clock was set back.
        elapsed = np.fmax.accumulate(steps["time"] - started)
        step_seconds = np.maximum(np.nan_to_num(elapsed), 0.0)
        return Run(
            path=path,
            number=run_number,
            settings=self._settings,
            step_seconds=step_seconds,
            steps=steps,
            rollouts=rollouts,
            began_seconds=_began_seconds(rollouts, steps, step_seconds),
            ended_seconds=np.maximum(rollouts["time"] - started, 0.0),
            groups=self._groups,
            finish_reasons=self._finish_reasons,
            learned=self._learned,
            totals=self._totals,
        )


def _began_seconds(rollouts: Columns, steps: Columns, step_seconds: np.ndarray) -> np.ndarray:
    """[rollouts] begin of the first target forward of each, in seconds; NaN where unknown.

    It assumes that the rollout took part in every step; a preempted one began earlier.
    """
    known = np.flatnonzero(np.isfinite(steps["step"]))
    first_step = rollouts["step"] - rollouts["verify_steps"] + 1
    is_known = np.isfinite(first_step) & (rollouts["verify_steps"] > 0)
    began = np.full(len(first_step), np.nan)
    if len(known):
        following = np.searchsorted(steps["step"][known], first_step[is_known])
        first = known[np.minimum(following, len(known) - 1)]  # it, or the next logged one
        total_ms = np.nan_to_num(steps["total_ms"][first])
        began[is_known] = np.maximum(step_seconds[first] - total_ms / 1e3, 0.0)
    return began


def _without_stamp(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("kind", "time")}
