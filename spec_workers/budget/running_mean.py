"""Times that are learned as running means."""

from __future__ import annotations

import math

_RATE = 0.1  # the least weight of a new time
_MAX_OUTLIER = 2.0  # one time counts as at most this multiple of the mean


class MeanByOctave:
    """Milliseconds by a count: a running mean for each octave of counts."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}  # octave -> times, mean

    def observe(self, count: int, milliseconds: float) -> None:
        """Learn a time. NaN is ignored."""
        if math.isnan(milliseconds):
            return
        octave = count.bit_length()
        times, mean = self._seen.get(octave, (0, milliseconds))
        new = min(milliseconds, _MAX_OUTLIER * mean)
        self._seen[octave] = times + 1, mean + max(1 / (times + 1), _RATE) * (new - mean)

    def milliseconds(self, count: int) -> float:
        """The usual time at this count, or at the nearest octave with times; 0 without any."""
        if not self._seen:
            return 0.0
        nearest = min(self._seen, key=lambda octave: abs(octave - count.bit_length()))
        return self._seen[nearest][1]
