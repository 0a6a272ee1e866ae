"""A time that grows in proportion to a few counts, learned as it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_NOISE_MS = 0.1  # of one step
_FIRST_MS = 1.0  # what the first count, one a step, may cost
_OTHER_MS = 0.03  # and the others, each
_MEMORY = 0.99  # a step
_CLIP = 3.0  # times the usual error that one step is believed
_USUAL = 0.05  # weight of a step in the usual error


class LinearCost:
    """Milliseconds as a weighted sum of counts, none of which makes it less.

    Recursive least squares with forgetting (Ljung 1999, chapter 11), with clipped errors.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """The first of the counts is 1 in every step."""
        self.names = tuple(names)
        self._weights = np.zeros(len(names))
        spread = np.array([_FIRST_MS, *[_OTHER_MS] * (len(names) - 1)])
        self._inverse = np.diag((spread / _NOISE_MS) ** 2)
        self._most = float(np.trace(self._inverse))
        self._usual_error: float | None = None

    def observe(self, counts: Sequence[float], milliseconds: float) -> None:
        x = np.array(counts, dtype=np.float64)
        error = milliseconds - float(self._weights @ x)
        if self._usual_error is None:
            self._usual_error = abs(error)
        limit = _CLIP * self._usual_error + 1e-3
        error = min(max(error, -limit), limit)
        self._usual_error += _USUAL * (abs(error) - self._usual_error)
        gain = self._inverse @ x
        gain /= _MEMORY + float(x @ gain)
        self._weights = np.maximum(self._weights + gain * error, 0.0)
        self._inverse -= np.outer(gain, self._inverse @ x)
        # Directions that no step shows would be forgotten without end.
        if np.trace(self._inverse) < self._most:
            self._inverse /= _MEMORY

    def milliseconds(self, counts: Sequence[float]) -> float:
        return float(self._weights @ np.array(counts, dtype=np.float64))

    def slope(self, name: str) -> float:
        """Milliseconds for one more of ``name``."""
        return float(self._weights[self.names.index(name)])

    def learned(self) -> dict[str, float]:
        return {name: float(w) for name, w in zip(self.names, self._weights.round(6), strict=True)}

    def restore(self, learned: Mapping[str, float]) -> None:
        """Raises ValueError for other counts, or what is no number."""
        if set(learned) != set(self.names):
            raise ValueError(f"must give a number for each of {', '.join(self.names)}")
        weights = np.array([float(learned[name]) for name in self.names])
        if not np.isfinite(weights).all() or weights.min() < 0:
            raise ValueError("must be finite and >= 0")
        self._weights = weights
