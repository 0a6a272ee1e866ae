"""The time of a target forward, learned as it runs.

Legend: K knots, flat: contexts x rows; H row knots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence with the least weighted squared distance from ``values``.

    Pool adjacent violators (Barlow et al. 1972): neighbours in the wrong order become their mean.
    ``weights``: > 0, like ``values``.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, before_weight, before_length = blocks.pop()
            mean = (mean * total + before * before_weight) / (total + before_weight)
            total += before_weight
            length += before_length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


_SMALLEST_CONTEXT = 256  # tokens; each further context of the curve is twice as long
_KNOTS_PER_OCTAVE = 2  # of rows

# Standard deviations, of the logarithm of milliseconds.
_UNKNOWN_SCALE = 3.0  # of a machine nothing was measured on
_SHAPE = 0.3  # of the curve around its first guess, whatever the scale
_NOISE = 0.06  # of one step
_SCALE_DRIFT = 0.015  # a step: machines get busy, clocks change
_SHAPE_DRIFT = 0.002  # a step
_CLIP = 2.0  # standard deviations of surprise that one step is believed


_ROWS_RANGE = 3.0  # octaves over which the shape is alike
_CONTEXT_RANGE = 3.0  # the same, of contexts
_FIXED_ROWS = 12.0  # first guess: what a forward costs beside its rows, as so many rows
_CONTEXT_SLOPE = 0.1  # first guess: log milliseconds from one context to the next


class CostCurve:
    """Milliseconds of a forward over its query rows and the longest context in it.

    The logarithm of the time is a Gaussian process (Rasmussen and Williams 2006, chapter 2) on a
    grid of knots, filtered step by step (Kalman 1960): every time seen moves the knots beside it
    most, their neighbours less, and all of them alike as far as the machine as a whole has become
    slower. Surprises are clipped, as in Huber's estimator, for a busy machine now and then takes
    ten times as long. What is read is monotone in rows and context.
    """

    def __init__(
        self,
        minimum_rows: int,
        max_rows: int,
        max_context_len: int,
        row_buckets: Sequence[int] = (),
    ) -> None:
        """
        Args:
            minimum_rows: shorter forwards are padded to so many, and cost about as much.
            row_buckets: ascending; forwards of no more rows than the last are padded to the next of
                them, and cost what that one does.
        """
        self._buckets = np.array(row_buckets, dtype=np.int64)
        self.rows_H = _row_knots(max(2, minimum_rows, max_rows), self._buckets)
        self.contexts = _context_knots(max_context_len)
        self.observations_K = np.zeros(self.rows_H.size * len(self.contexts))
        guess_H = np.log1p(np.maximum(self.rows_H, minimum_rows) / _FIXED_ROWS)
        per_context = _CONTEXT_SLOPE * np.arange(len(self.contexts))
        self._mean_K = (guess_H + per_context[:, None]).ravel()
        alike_KK = self._kernel()
        self._covariance_KK = _UNKNOWN_SCALE**2 + _SHAPE**2 * alike_KK
        self._drift_KK = _SCALE_DRIFT**2 + _SHAPE_DRIFT**2 * alike_KK

    @property
    def is_known(self) -> bool:
        """Whether any forward was timed."""
        return bool(self.observations_K.any())

    def observe(
        self, num_rows: int, longest_context: int, milliseconds: float, steps: int = 1
    ) -> None:
        """Learn the time of a forward, ``steps`` after the one observed before it.

        Times that are not positive, or not known (NaN), are ignored.
        """
        if not milliseconds > 0:
            return
        self._covariance_KK += steps * self._drift_KK
        num_rows = int(self._padded(np.array([num_rows]))[0])
        first, beyond = self._knot_below(num_rows, longest_context)
        second = first + (beyond > 0)
        covariance_K = (1 - beyond) * self._covariance_KK[first]
        covariance_K = covariance_K + beyond * self._covariance_KK[second]
        variance = (1 - beyond) * covariance_K[first] + beyond * covariance_K[second]
        variance = float(variance) + _NOISE**2
        expected = (1 - beyond) * self._mean_K[first] + beyond * self._mean_K[second]
        surprise = math.log(milliseconds) - float(expected)
        limit = _CLIP * math.sqrt(variance)
        gain_K = covariance_K / variance
        self._mean_K += gain_K * min(max(surprise, -limit), limit)
        self._covariance_KK -= np.outer(gain_K, covariance_K)
        self.observations_K[first] += 1 - beyond
        self.observations_K[second] += beyond

    def milliseconds(self, rows: NDArray[np.int64], longest_context: int) -> NDArray[np.float64]:
        """The time of a forward of each number of rows: float64, like ``rows``."""
        heights_H = self._heights(self._context(longest_context) + 1)[-1]
        rows = self._padded(rows)
        times = np.interp(rows, self.rows_H, heights_H)
        beyond = np.maximum(rows / self.rows_H[-1], 1.0)  # past the last knot: in proportion
        return np.exp(times) * beyond

    def learned(self) -> dict[str, Any]:
        """The learned curve as a JSON-able object, for people to look at."""
        shape = (len(self.contexts), self.rows_H.size)
        return {
            "rows": self.rows_H.tolist(),
            "contexts": list(self.contexts),
            "milliseconds": np.exp(self._heights(len(self.contexts))).round(6).tolist(),
            "observations": self.observations_K.reshape(shape).round(1).tolist(),
        }

    def _padded(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._buckets.size:
            return rows
        bucket = np.searchsorted(self._buckets, rows)
        return np.where(rows > self._buckets[-1], rows, self._buckets.take(bucket, mode="clip"))

    def _heights(self, max_contexts: int) -> NDArray[np.float64]:
        """Log milliseconds [max_contexts, H], monotone in rows and contexts.

        In rows this is the nearest monotone curve, in which the surest knots move least. A longer
        context takes at least the time of a shorter one.
        """
        size = self.rows_H.size
        means = self._mean_K.reshape(-1, size)[:max_contexts]
        variances = self._covariance_KK.diagonal().reshape(-1, size)[:max_contexts]
        heights = [
            isotonic(mean_H, weight_H)
            for mean_H, weight_H in zip(means.tolist(), (1.0 / variances).tolist(), strict=True)
        ]
        return np.maximum.accumulate(np.array(heights), 0)

    def _context(self, longest: int) -> int:
        return min(max(0, math.ceil(longest / _SMALLEST_CONTEXT) - 1).bit_length(),
                   len(self.contexts) - 1)  # fmt: skip

    def _knot_below(self, num_rows: int, longest_context: int) -> tuple[int, float]:
        """The knot at or before, and the fraction of the way from it to the next one."""
        rows_H = self.rows_H
        knot = int(np.searchsorted(rows_H, num_rows, side="right")) - 1
        row = self._context(longest_context) * rows_H.size
        if knot < 0:
            return row, 0.0
        if knot >= rows_H.size - 1:
            return row + rows_H.size - 1, 0.0
        gap = float(rows_H[knot + 1] - rows_H[knot])
        return row + knot, float(num_rows - rows_H[knot]) / gap

    def _kernel(self) -> NDArray[np.float64]:
        octave_H = np.log2(self.rows_H)
        step = np.arange(len(self.contexts))
        rows = np.exp(-np.abs(octave_H[:, None] - octave_H) / _ROWS_RANGE)
        contexts = np.exp(-np.abs(step[:, None] - step) / _CONTEXT_RANGE)
        return np.kron(contexts, rows)


def _row_knots(last: int, buckets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The buckets, and beyond the last of them steps of half an octave."""
    steps = np.arange(math.ceil(math.log2(last) * _KNOTS_PER_OCTAVE) + 1) / _KNOTS_PER_OCTAVE
    knots = np.unique(np.round(2.0**steps)).astype(np.int64)
    return np.concatenate([buckets, knots[knots > buckets.max(initial=0)]])


def _context_knots(max_context_len: int) -> tuple[int, ...]:
    """The context lengths that end the curve's buckets; the last bucket takes all that is
    longer."""
    octaves = max(0, math.ceil(max_context_len / _SMALLEST_CONTEXT) - 1).bit_length()
    return tuple(_SMALLEST_CONTEXT << k for k in range(octaves + 1))
