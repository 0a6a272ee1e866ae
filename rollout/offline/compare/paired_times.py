"""The ratio of two sides' times over the same pieces of work, with its error.

Legend: P pairs, R resamples.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_FEWEST = 6
"""Pairs below which an interval means little."""


class SpeedupVerdict(enum.StrEnum):
    """The answers to whether speculation pays."""

    PAYS = "pays"
    COSTS = "does not pay"
    UNCLEAR = "unclear"


@dataclass(slots=True)
class PairedTimes:
    """Seconds of plain and of speculative decoding of the same work, pair by pair.

    A slow machine slows both times of a pair, so their ratio is steadier than the times.
    """

    plain_P: list[float] = field(default_factory=list)
    speculative_P: list[float] = field(default_factory=list)

    def add(self, plain: float, speculative: float) -> None:
        self.plain_P.append(plain)
        self.speculative_P.append(speculative)

    def extend(self, later: PairedTimes) -> None:
        self.plain_P += later.plain_P
        self.speculative_P += later.speculative_P

    def __len__(self) -> int:
        return len(self.plain_P)

    @property
    def speedup(self) -> float:
        """All of plain decoding's time over all of speculation's; 1 while there is no pair."""
        return sum(self.plain_P) / sum(self.speculative_P) if self.plain_P else 1.0

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `speedup`, by the percentile bootstrap over pairs (Efron 1979).

        From zero to infinity with fewer than six pairs. The same pairs give the same interval.
        """
        if len(self) < _FEWEST:
            return 0.0, float("inf")
        picked_RP = np.random.default_rng(0).integers(0, len(self), (_RESAMPLES, len(self)))
        plain_R = np.array(self.plain_P)[picked_RP].sum(axis=1)
        speculative_R = np.array(self.speculative_P)[picked_RP].sum(axis=1)
        tail = (1 - _CONFIDENCE) / 2
        low, high = np.quantile(plain_R / speculative_R, [tail, 1 - tail])
        return float(low), float(high)

    @property
    def verdict(self) -> SpeedupVerdict:
        """Whether the confidence interval of the speedup lies above 1, below 1 or on both sides."""
        low, high = self.interval()
        if low > 1.0:
            return SpeedupVerdict.PAYS
        return SpeedupVerdict.COSTS if high < 1.0 else SpeedupVerdict.UNCLEAR

    def __str__(self) -> str:
        low, high = self.interval()
        if high == float("inf"):
            return f"{self.speedup:.2f}x (too few pairs for an interval)"
        return f"{self.speedup:.2f}x \N{PLUS-MINUS SIGN} {(high - low) / 2:.2f}"
