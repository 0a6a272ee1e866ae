"""The time of a target forward by its query rows, learned as it runs.

Legend: H knots of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KNOTS_PER_OCTAVE = 2
_FIXED_ROWS = 12.0  # before anything is known, a forward costs this many rows beside its own
_RATE = 0.05  # the least weight of a new time in the mean at a knot
_COMMON_RATE = 0.05  # the weight of a new time at all knots
_MAX_OUTLIER = 1.5  # one time counts as at most this multiple of the expected one, or its inverse


class CostCurve:
    """Milliseconds of a forward and its sampling by query rows.

    Running means at knots half an octave apart; a time between two knots moves both. A machine that
    slows down does so at every size, so each time moves all knots a little. Knots without times
    follow the nearest ones that have some.
    """

    def __init__(self, minimum_rows: int, max_rows: int, row_buckets: Sequence[int] = ()) -> None:
        """
        Args:
            minimum_rows: shorter forwards are padded to this size.
            row_buckets: ascending; forwards of no more rows than the last are padded to the next.
        """
        self._buckets = np.array(row_buckets, dtype=np.int64)
        self.rows_H = _row_knots(max(2, minimum_rows, max_rows), self._buckets)
        self._guess_H = np.log(np.maximum(self.rows_H, minimum_rows) + _FIXED_ROWS)
        self._above_guess_H = np.zeros(self.rows_H.size)  # of log milliseconds
        self._counts_H = np.zeros(self.rows_H.size)
        self._times_H = self._times()

    @property
    def is_known(self) -> bool:
        """Whether any forward was timed."""
        return bool(self._counts_H.any())

    def observe(self, num_rows: int, milliseconds: float) -> None:
        if not milliseconds > 0:
            return
        rows = self._padded(np.array([num_rows]))
        place = float(np.interp(rows, self.rows_H, np.arange(self.rows_H.size))[0])
        below = min(int(place), self.rows_H.size - 2)
        around, weights = [below, below + 1], np.array([below + 1 - place, place - below])
        self._above_guess_H = self._interpolated()
        expected = float(weights @ (self._guess_H + self._above_guess_H)[around])
        surprise = math.log(milliseconds) - expected
        if not self.is_known:
            self._above_guess_H += surprise
        else:
            limit = math.log(_MAX_OUTLIER)
            surprise = min(max(surprise, -limit), limit)
            rate_H = np.full(self.rows_H.size, _COMMON_RATE)
            counts = self._counts_H[around] + weights
            rate_H[around] += weights * np.maximum(1.0 / np.maximum(counts, 1e-9), _RATE)
            self._above_guess_H += np.minimum(rate_H, 1.0) * surprise
        self._counts_H[around] += weights
        self._times_H = self._times()

    def milliseconds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The time of a forward of each number of rows: float64, like ``rows``, never falling."""
        rows = self._padded(rows)
        beyond = np.maximum(rows / self.rows_H[-1], 1.0)  # past the last knot: in proportion
        return np.interp(rows, self.rows_H, self._times_H) * beyond

    def learned(self) -> dict[str, Any]:
        return {
            "rows": self.rows_H.tolist(),
            "milliseconds": self._times_H.round(6).tolist(),
            "observations": self._counts_H.round(1).tolist(),
        }

    def _times(self) -> NDArray[np.float64]:
        times_H = np.exp(self._guess_H + self._interpolated())
        # Half-way between the least curve above that never falls and the highest one below.
        above_H = np.maximum.accumulate(times_H)
        return (above_H + np.minimum.accumulate(times_H[::-1])[::-1]) / 2

    def _interpolated(self) -> NDArray[np.float64]:
        seen = np.flatnonzero(self._counts_H)
        if not seen.size:
            return self._above_guess_H
        return np.interp(np.arange(self.rows_H.size), seen, self._above_guess_H[seen])

    def _padded(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._buckets.size:
            return rows
        bucket = np.searchsorted(self._buckets, rows)
        return np.where(rows > self._buckets[-1], rows, self._buckets.take(bucket, mode="clip"))


def _row_knots(last: int, buckets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The buckets, and beyond the last of them steps of half an octave."""
    steps = np.arange(math.ceil(math.log2(last) * _KNOTS_PER_OCTAVE) + 1) / _KNOTS_PER_OCTAVE
    knots = np.unique(np.round(2.0**steps)).astype(np.int64)
    return np.concatenate([buckets, knots[knots > buckets.max(initial=0)]])
