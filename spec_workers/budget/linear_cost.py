"""A time that grows in proportion to a count, learned as it runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from spec_workers.budget.loaded import MAX_VALUE, table

_NOISE = 0.1  # milliseconds, of one step
_FIRST_STEP, _FIRST_EACH = 1.0, 0.03  # milliseconds that either may cost
_MEMORY = 0.99  # a step
_CLIP = 3.0  # times the usual error that one step is believed
_CLIP_SHARE = 0.1  # and of the time expected: times that never vary must not be held for ever
_USUAL = 0.05  # weight of a step in the usual error


class LinearCost:
    """Milliseconds a step and so many for each of what is counted in it.

    Recursive least squares with clipped errors, which forgets along each step's counts alone
    (Kulhavy 1987, restricted exponential forgetting).
    """

    def __init__(self) -> None:
        self._weights = np.zeros(2)  # a step, each
        self._inverse = np.diag([(_FIRST_STEP / _NOISE) ** 2, (_FIRST_EACH / _NOISE) ** 2])
        self._usual_error: float | None = None

    def observe(self, count: float, milliseconds: float) -> None:
        x = np.array([1.0, count])
        expected = float(self._weights @ x)
        error = milliseconds - expected
        if self._usual_error is None:
            self._usual_error = abs(error)
        limit = _CLIP * self._usual_error + _CLIP_SHARE * abs(expected) + 1e-3
        error = min(max(error, -limit), limit)
        self._usual_error += _USUAL * (abs(error) - self._usual_error)
        along = self._inverse @ x
        spread = float(x @ along)
        self._weights += along * (error / (1.0 + spread))
        # What is forgotten is what this step tells anew: a count that never varies stays known.
        believed = _MEMORY - (1.0 - _MEMORY) / spread
        self._inverse -= np.outer(along, along) * (believed / (_MEMORY * (1.0 + spread)))

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
        self._weights = np.array(
            [table(learned, name, (), minimum=-MAX_VALUE) for name in ("step", "each")]
        )
