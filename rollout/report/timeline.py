"""Seconds since a run began to generate, from clocks that a log may lack."""

from __future__ import annotations

import numpy as np

from rollout.report.columns import Columns


class Timeline:
    """Of one run. Where steps have no time, their durations are summed up instead."""

    def __init__(self, steps: Columns, started: float) -> None:
        """``started``: Unix seconds; NaN: a step's length before the first one was logged."""
        self._known = np.flatnonzero(np.isfinite(steps["step"]))
        self._numbers = steps["step"][self._known]
        self._step_ms = np.nan_to_num(steps["total_ms"])
        times = steps["time"]
        has_time = np.flatnonzero(np.isfinite(times))
        if np.isnan(started) and len(has_time):
            started = times[has_time[0]] - self._step_ms[has_time[0]] / 1e3
        self._started = started
        if len(has_time):
            # A clock that was set back meanwhile must not make time run backwards.
            elapsed = np.fmax.accumulate(times - started)
            self.step_seconds = np.maximum(np.nan_to_num(elapsed), 0.0)
        else:
            self.step_seconds = np.cumsum(self._step_ms) / 1e3

    def ended(self, rollouts: Columns) -> np.ndarray:
        """[rollouts]; NaN where unknown."""
        by_clock = np.maximum(rollouts["time"] - self._started, 0.0)
        return np.where(np.isfinite(by_clock), by_clock, self._at_step(rollouts["step"]))

    def began(self, rollouts: Columns) -> np.ndarray:
        """[rollouts] when the first of its target forwards began, had it taken part in every step.

        A rollout that was preempted began earlier. NaN where unknown.
        """
        first_step = rollouts["step"] - rollouts["verify_steps"] + 1
        began = self._at_step(first_step, begin=True)
        return np.where(rollouts["verify_steps"] > 0, began, np.nan)

    def _at_step(self, numbers: np.ndarray, *, begin: bool = False) -> np.ndarray:
        """When these steps ended (or began), or the next ones that were logged."""
        if not len(self._known):
            return np.full(len(numbers), np.nan)
        places = np.searchsorted(self._numbers, np.nan_to_num(numbers, nan=np.inf))
        steps = self._known[np.minimum(places, len(self._known) - 1)]
        seconds = self.step_seconds[steps]
        if begin:
            seconds = np.maximum(seconds - self._step_ms[steps] / 1e3, 0.0)
        return np.where(np.isfinite(numbers), seconds, np.nan)
