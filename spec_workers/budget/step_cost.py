"""The cost of a step: forward, sampling and drafting, learned together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.types import StepTimes
from spec_workers.budget.cost_curve import CostCurve

_NOISE = 0.1  # milliseconds, of one step
_FIRST_STEP, _FIRST_EACH = 1.0, 0.03  # milliseconds that either may cost
_MEMORY = 0.99  # a step
_CLIP = 3.0  # times the usual error that one step is believed
_CLIP_SHARE = 0.1  # and of the time expected: times that never vary must not be held for ever
_USUAL = 0.05  # weight of a step in the usual error


class LinearCost:
    """Learned milliseconds of a step as a line: a constant, and a slope for each counted item.

    Recursive least squares with clipped errors, which forgets along each step's counts alone
    (Kulhavy 1987, restricted exponential forgetting).
    """

    def __init__(self) -> None:
        self._weights = np.zeros(2)  # a step, each
        self._inverse = np.diag([(_FIRST_STEP / _NOISE) ** 2, (_FIRST_EACH / _NOISE) ** 2])
        self._usual_error: float | None = None

    def observe(self, count: float, milliseconds: float) -> None:
        """Learn the time of a step with so many items."""
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
        """The time of a step with so many items."""
        return max(0.0, float(self._weights[0] + self._weights[1] * count))

    @property
    def each(self) -> float:
        """Milliseconds per item."""
        return max(0.0, float(self._weights[1]))

    def learned(self) -> dict[str, float]:
        """The learned costs as a JSON-able object."""
        step, each = self._weights.round(6).tolist()
        return {"step": step, "each": each}


class StepCost:
    """Milliseconds of a step by running requests, query rows and longest context.

    The forward is a curve; sampling and acceptance grow with the rows sampled from, drafting and
    taking in what was emitted with the requests.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._sampling = LinearCost()  # by rows sampled from
        self._drafting = LinearCost()  # by requests
        self._following = LinearCost()  # by requests, where nothing is proposed
        self._reading = LinearCost()  # the same, where a draft reads all the same

    @property
    def is_known(self) -> bool:
        """Whether any forward was timed."""
        return self.curve.is_known

    def forward_ms(
        self, rows: NDArray[np.int64], sampled: NDArray[np.int64], longest_context: int
    ) -> NDArray[np.float64]:
        """Milliseconds of forward and sampling, for each number of ``rows``.

        ``sampled``: how many of each number of ``rows`` are sampled from, ascending.
        """
        sampling = self._sampling.milliseconds(float(sampled[0]))
        more = self._sampling.each * (sampled - sampled[0])
        return self.curve.milliseconds(rows, longest_context) + (sampling + more)

    def draft_ms(self, width: int) -> float:
        """The drafting time of a step that proposes, of so many requests."""
        return self._drafting.milliseconds(width)

    def idle_draft_ms(self, width: int) -> float:
        """The drafting time of a step that proposes nothing and only takes tokens in, as every step
        does while drafting is shut."""
        return self._following.milliseconds(width)

    def read_ms(self, width: int) -> float:
        """The drafting time of a step that proposes nothing, but whose tokens a draft reads."""
        return self._reading.milliseconds(width)

    def observe(
        self,
        *,
        width: int,
        rows: int,
        longest_context: int,
        proposed: bool,
        times: StepTimes,
        decode_only: bool,
        steps: int,
        reads: bool = False,
    ) -> None:
        """Learn the times of a step, ``steps`` after the one observed before it.

        ``proposed``: whether draft nodes were asked for. ``reads``: whether a draft read the tokens
        though it was not asked. ``times``: NaN where the timing of a phase is not steady-state.

        Only steps without prefill tell anything: prefill rows have no logits, and neural drafts
        read each of them.
        """
        if not decode_only:
            return
        self.curve.observe(rows, longest_context, times.forward, steps)
        self._sampling.observe(rows, times.sample)
        if not math.isnan(times.draft):
            idle = self._reading if reads else self._following
            (self._drafting if proposed else idle).observe(width, times.draft)

    def learned(self) -> dict[str, Any]:
        """The learned costs as a JSON-able object, for people to look at."""
        return {
            "cost": self.curve.learned(),
            "request_ms": {
                "sampling": self._sampling.learned(),
                "drafting": self._drafting.learned(),
                "following": self._following.learned(),
                "reading": self._reading.learned(),
            },
        }
