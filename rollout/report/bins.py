"""Consecutive steps of a run in bins, for lines of few points."""

from __future__ import annotations

import numpy as np

from rollout.report.run import Run

MAX_BINS = 120


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
