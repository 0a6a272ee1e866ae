"""Steps taken together, so that a plot of a hundred thousand has no more points than pixels."""

from __future__ import annotations

import numpy as np

from rollout.report.run import Run

MAX_BINS = 300


class Bins:
    """Consecutive steps of one run in groups of (nearly) equal number, at least one each."""

    def __init__(self, run: Run, most: int = MAX_BINS) -> None:
        assert run.num_steps, "a run without steps has no bins"
        self._run = run
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
