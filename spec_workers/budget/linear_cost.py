"""A time that grows in proportion to a count, learned as it runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_NOISE = 0.1  # milliseconds, of one step
_FIRST_STEP, _FIRST_EACH = 1.0, 0.03  # milliseconds that either may cost
_MEMORY = 0.99  # a step
_CLIP = 3.0  # times the usual error that one step is believed
_USUAL = 0.05  # weight of a step in the usual error


class LinearCost:
    """Milliseconds a step and so many for each of what is counted in it.

    Recursive least squares with forgetting (Ljung 1999, chapter 11), with clipped errors.
    """

    def __init__(self) -> None:
        self._weights = np.zeros(2)  # a step, each
        self._inverse = np.diag([(_FIRST_STEP / _NOISE) ** 2, (_FIRST_EACH / _NOISE) ** 2])
        self._most = self._inverse.diagonal().copy()
        self._usual_error: float | None = None

    def observe(self, count: float, milliseconds: float) -> None:
        x = np.array([1.0, count])
        error = milliseconds - float(self._weights @ x)
        if self._usual_error is None:
            self._usual_error = abs(error)
        limit = _CLIP * self._usual_error + 1e-3
        error = min(max(error, -limit), limit)
        self._usual_error += _USUAL * (abs(error) - self._usual_error)
        gain = self._inverse @ x
        gain /= _MEMORY + float(x @ gain)
        self._weights += gain * error
        self._inverse -= np.outer(gain, self._inverse @ x)
        # What no step shows, for all have the same count, would be forgotten without end.
        if (self._inverse.diagonal() < self._most).all():
            self._inverse /= _MEMORY

    def milliseconds(self, count: float) -> float:
        return max(0.0, float(self._weights[0] + self._weights[1] * count))

    @property
    def each(self) -> float:
        """Milliseconds for one more."""
        return max(0.0, float(self._weights[1]))

    def learned(self) -> dict[str, float]:
        step, each = self._weights.round(6).tolist()
        return {"step": step, "each": each}

    def restore(self, learned: Mapping[str, float]) -> None:
        """Raises ValueError for what is no such cost."""
        if set(learned) != {"step", "each"}:
            raise ValueError("must give milliseconds for step and each")
        weights = np.array([float(learned["step"]), float(learned["each"])])
        if not np.isfinite(weights).all():
            raise ValueError("step, each: must be finite")
        self._weights = weights
