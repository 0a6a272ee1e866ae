"""The time of a target forward by its query rows, learned as it runs.

Lists, not arrays: they are few numbers, read and written in every step.

Legend: H knots of rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KNOTS_PER_OCTAVE = 2
_FIXED_ROWS = 12.0  # before anything is known, a forward costs this many rows beside its own
_RATE = 0.05  # the least weight of a new time in the mean at a knot
_COMMON_RATE = 0.05  # the weight of a new time at all knots
_SETTLED = 10.0  # times at a knot from which on one more tells what the machine does
_MAX_OUTLIER = 1.5  # one time counts as at most this multiple of the expected one, or its inverse


class CostCurve:
    """Milliseconds of a forward and its sampling by query rows.

    Running means at knots half an octave apart; a time between two knots moves both, and all others
    a little. Knots without times follow the nearest ones that have some.
    """

    def __init__(self, minimum_rows: int, max_rows: int, row_buckets: Sequence[int] = ()) -> None:
        """
        Args:
            minimum_rows: shorter forwards are padded to this size.
            row_buckets: ascending; forwards of no more rows than the last are padded to the next.
        """
        self._buckets = list(row_buckets)
        self.rows_H = _row_knots(max(2, minimum_rows, max_rows), self._buckets)
        self._guess_H = [math.log(max(rows, minimum_rows) + _FIXED_ROWS) for rows in self.rows_H]
        self._above_guess_H = [0.0] * len(self.rows_H)  # of log milliseconds
        self._counts_H = [0.0] * len(self.rows_H)
        self._times_H = self._fitted()

    @property
    def is_known(self) -> bool:
        """Whether any forward was timed."""
        return any(self._counts_H)

    def copy(self) -> CostCurve:
        """A curve of the same times, which new ones soon outweigh."""
        copied = deepcopy(self)
        copied._counts_H = [min(count, 1.0) for count in self._counts_H]
        return copied

    def observe(self, num_rows: int, milliseconds: float) -> float:
        """Learn a time; one that is not positive is ignored.

        Returns the logarithm of its ratio to the expected time, within bounds; 0 while too few
        times were seen to expect one.
        """
        if not milliseconds > 0:
            return 0.0
        low, share = self._place(self._padded(num_rows))
        weights = {low: 1.0 - share, low + 1: share}
        guess_H, above_H = self._guess_H, self._above_guess_H
        surprise = math.log(milliseconds)
        surprise -= sum(weight * (guess_H[h] + above_H[h]) for h, weight in weights.items())
        is_first = not self.is_known
        if is_first:
            self._above_guess_H = [surprise] * len(above_H)
        else:
            limit = math.log(_MAX_OUTLIER)
            surprise = min(max(surprise, -limit), limit)
            for h, weight in weights.items():
                own = weight * max(1.0 / max(self._counts_H[h] + weight, 1e-9), _RATE)
                above_H[h] += min(own, 1.0 - _COMMON_RATE) * surprise
        is_settled = all(self._counts_H[h] >= _SETTLED or not w for h, w in weights.items())
        for h, weight in weights.items():
            self._counts_H[h] += weight
        self.drift(0.0 if is_first else surprise)
        return surprise if is_settled else 0.0

    def drift(self, surprise: float) -> None:
        """Follow a time elsewhere that surprised: a machine that slows down does so everywhere."""
        self._above_guess_H = [above + _COMMON_RATE * surprise for above in self._above_guess_H]
        self._times_H = self._fitted()

    def at(self, rows: int) -> float:
        """The time of a forward of so many rows."""
        return float(self.milliseconds(np.array([rows]))[0])

    def milliseconds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The time of a forward of each number of rows: float64, like ``rows``, never falling."""
        if self._buckets:
            bucket = np.searchsorted(self._buckets, rows)
            padded = np.take(self._buckets, bucket, mode="clip")
            rows = np.where(rows > self._buckets[-1], rows, padded)
        beyond = np.maximum(rows / self.rows_H[-1], 1.0)  # past the last knot: in proportion
        return np.interp(rows, self.rows_H, self._times_H) * beyond

    def learned(self) -> dict[str, Any]:
        return {
            "rows": self.rows_H,
            "milliseconds": [round(each, 6) for each in self._times_H],
            "observations": [round(each, 1) for each in self._counts_H],
        }

    def _fitted(self) -> list[float]:
        seen = [h for h, count in enumerate(self._counts_H) if count]
        if 0 < len(seen) < len(self.rows_H):
            known = [self._above_guess_H[h] for h in seen]
            self._above_guess_H = np.interp(range(len(self.rows_H)), seen, known).tolist()
        parts = zip(self._guess_H, self._above_guess_H, strict=True)
        times_H = [math.exp(guess + above) for guess, above in parts]
        # Half-way between the least curve above that never falls and the highest one below.
        above_H = accumulate(times_H, max)
        below_H = reversed([*accumulate(reversed(times_H), min)])
        return [(above + below) / 2 for above, below in zip(above_H, below_H, strict=True)]

    def _place(self, rows: int) -> tuple[int, float]:
        """The knot at or below these rows, and the share of the way to the next; in [0, 1]."""
        rows_H = self.rows_H
        low = min(max(bisect_right(rows_H, rows) - 1, 0), len(rows_H) - 2)
        share = (rows - rows_H[low]) / (rows_H[low + 1] - rows_H[low])
        return low, min(max(share, 0.0), 1.0)

    def _padded(self, rows: int) -> int:
        index = bisect_left(self._buckets, rows)
        return self._buckets[index] if index < len(self._buckets) else rows


def _row_knots(last: int, buckets: list[int]) -> list[int]:
    """The buckets, and beyond the last of them steps of half an octave."""
    steps = range(math.ceil(math.log2(last) * _KNOTS_PER_OCTAVE) + 1)
    knots = dict.fromkeys(round(2.0 ** (step / _KNOTS_PER_OCTAVE)) for step in steps)
    return [*buckets, *(rows for rows in knots if rows > max(buckets, default=0))]
