"""The speedup over plain decoding, measured by plain steps between drafting ones; and its error."""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_INTERVAL = 1.96
"""Standard errors in half of a 95 % interval."""

MIN_STEPS = 5
"""Plain steps, and drafting steps, below which nothing is claimed."""

_FEWEST = 4  # differences whose scatter is believed
_FIRST_ERROR = 0.5  # of the pace before that, so that nothing is claimed
_PREDICTION_ERROR = 0.02
"""Standard error of the times predicted for drafting steps over those for plain ones. More plain
steps do not lessen it: the learned curve is a little wrong, and so is what a token is worth in a
batch whose requests advance unevenly."""
_LEAST_SHOWN = 0.01  # of a run's time: less than is printed
_NARROW = 0.05  # half of an interval which rules out a speedup that matters
_LONGEST = 2.0  # times the pace: more of a step's time is the machine's doing


class PlainPace:
    """The ratio of measured to predicted time of plain steps, and the time that drafts saved by it.

    Drafting steps are compared with the plain step before them and the one after them, so a machine
    that slows down slows both sides. The scatter of the pace is half the mean squared difference of
    neighbours (von Neumann 1941), which a slow drift hardly touches.
    """

    def __init__(self) -> None:
        self.ratio = 1.0  # milliseconds of plain decoding for one predicted, at the last plain step
        self._seen = 0  # plain steps
        self._squares = 0.0  # of differences of neighbours, halved
        self._saved_ms = 0.0  # predicted, by all drafting steps
        self._pending_ms = 0.0  # that since the last plain step
        self._weight_ms = 0.0  # of the last plain step's pace in what was saved before it
        self._earlier_ms2 = 0.0  # squared weights of earlier ones

    def bounded(self, took_ms: float, predicted_ms: float) -> float:
        """The time a step took, without what a moment's stall of the machine added to it."""
        return min(took_ms, _LONGEST * self.ratio * predicted_ms) if self._seen else took_ms

    def observe(self, took_ms: float, predicted_ms: float) -> float:
        """Record the time of a step that verified no draft.

        Returns the milliseconds by which this changes what was saved since the plain step before.
        """
        ratio = self.bounded(took_ms, predicted_ms) / predicted_ms
        change = ratio - self.ratio
        if self._seen:
            change /= 2  # drafting steps between two plain ones go by the mean of both
            self._squares += 2 * change**2
            self._earlier_ms2 += (self._weight_ms + self._pending_ms / 2) ** 2
            self._weight_ms = self._pending_ms / 2
        else:
            self._weight_ms = self._pending_ms
        corrected_ms = change * self._pending_ms
        self.ratio, self._pending_ms = ratio, 0.0
        self._seen += 1
        return corrected_ms

    def record_saved(self, predicted_ms: float) -> float:
        """Count predicted milliseconds of plain decoding that drafts saved; returns them at the
        current pace."""
        self._saved_ms += predicted_ms
        self._pending_ms += predicted_ms
        return self.ratio * predicted_ms

    @property
    def variance_ms2(self) -> float:
        """The squared standard error of all that was saved.

        The scatter is the variance of Student's distribution, which is wide for few differences.
        """
        differences = self._seen - 1
        few = differences < _FEWEST
        scatter = (_FIRST_ERROR * self.ratio) ** 2 if few else self._squares / (differences - 2)
        pace_ms2 = scatter * (self._earlier_ms2 + (self._weight_ms + self._pending_ms) ** 2)
        return pace_ms2 + (_PREDICTION_ERROR * self.ratio * self._saved_ms) ** 2


@dataclass(frozen=True, slots=True)
class Saving:
    """The seconds that drafts saved of a run, with half of their 95 % interval."""

    seconds: float
    error_seconds: float  # infinite where too few steps were compared
    run_seconds: float

    @property
    def speedup(self) -> float:
        """The time of plain decoding over the run's own."""
        return 1.0 + self.seconds / self.run_seconds if self.run_seconds else 1.0

    @property
    def speedup_error(self) -> float:
        """Half of the 95 % interval of `speedup`, at least 0.01."""
        share = self.error_seconds / self.run_seconds if self.run_seconds else 0.0
        return max(share, _LEAST_SHOWN)

    @property
    def is_measured(self) -> bool:
        """Whether enough steps were compared to give a figure."""
        return math.isfinite(self.error_seconds)

    @property
    def is_significant(self) -> bool:
        """Whether the interval of `speedup` leaves out 1."""
        return abs(self.speedup - 1.0) > self.speedup_error

    @property
    def factor(self) -> str:
        """The speedup with its error, such as ``1.20x ± 0.10``; a dash where it is not measured."""
        if not self.is_measured:
            return "-"
        return f"{self.speedup:.2f}x \N{PLUS-MINUS SIGN} {self.speedup_error:.2f}"

    def __str__(self) -> str:
        if not self.is_measured:
            return (
                f"speedup not measured: too few steps (it takes {MIN_STEPS} plain and {MIN_STEPS} "
                "drafting ones)"
            )
        if self.is_significant:
            seconds = round(self.seconds, 1) + 0.0  # never -0.0
            saved = f"{seconds:+.1f} s \N{PLUS-MINUS SIGN} {self.error_seconds:.1f}"
            return f"{self.factor} over plain decoding ({saved})"
        if self.speedup_error < _NARROW:
            return f"no measurable speedup ({self.factor})"
        return f"inconclusive: {self.factor} against plain decoding"
