"""Reads the log of a run, whatever state it was left in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError
from rollout.report.columns import ColumnsBuilder, number
from rollout.report.run import ROLLOUT_FIELDS, STEP_FIELDS, Log, Run
from rollout.report.timeline import Timeline

_KINDS = ("run", "step", "rollout", "learned", "totals")


def read_log(path: Path) -> Log:
    """All runs of a log that `log.jsonl` named.

    Lines that are torn or of no known kind are counted and left out, and so is what a line has
    that is no number where one belongs. Raises InvalidInputError where there is no such file, or
    nothing of a log in it.
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
            f"is not the log of a run, {found}: give the file that log.jsonl named",
        )
    told = [run for run in runs if run.num_lines] or runs[-1:]  # some were stopped at once
    return Log(path=path, runs=_one_after_the_other(told), num_unreadable=num_unreadable)


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    if "kind" not in line and "step" in line and "total_ms" in line:
        line["kind"] = "step"  # as logs were before they had other lines
    return line if line.get("kind") in _KINDS else None


def _one_after_the_other(open_runs: list[_OpenRun]) -> list[Run]:
    runs: list[Run] = []
    for index, each in enumerate(open_runs, start=1):
        run = each.close(index)
        if runs:
            run.offset = runs[-1].offset + runs[-1].seconds
        runs.append(run)
    return runs


class _OpenRun:
    """A run whose lines are being read."""

    def __init__(self) -> None:
        self.num_lines = 0  # but for the one that begins it
        self._settings: Mapping[str, Any] | None = None
        self._learned: Mapping[str, Any] = {}
        self._totals: Mapping[str, Any] = {}
        self._steps = ColumnsBuilder(STEP_FIELDS)
        self._rollouts = ColumnsBuilder(ROLLOUT_FIELDS)
        self._groups: list[str] = []
        self._finish_reasons: list[str] = []
        self._last_step = float("-inf")

    def ends_before(self, line: Mapping[str, Any]) -> bool:
        """Another run begins with ``line``: it says so, or it counts steps anew."""
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

    def close(self, run_number: int) -> Run:
        steps, rollouts = self._steps.columns(), self._rollouts.columns()
        settings = self._settings or {}
        times = Timeline(steps, number(settings.get("time")))
        return Run(
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
