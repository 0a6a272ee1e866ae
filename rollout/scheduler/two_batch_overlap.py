"""Two-batch overlap: whether two halves of the running requests take turns on the device.

SGLang calls it TBO and vLLM DBO. It is on while it is measured to be faster.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from rollout.config import Overlap
from rollout.types import StepTimes

_MARGIN = 0.05  # of the time of whole steps: what halves must spare, to be tried or begun with
_KNOWN = 8  # steps of a kind until their speed is known
_WINDOW = 16  # latest steps of a kind that count
_SETTLING = 4  # first steps after a change, which count for neither
_STALE = 1024  # steps after which a kind that was not seen since is forgotten, and tried again
_MAX_TRIES = 4 * (_SETTLING + _KNOWN)  # halved steps of a size whose speed stays unknown
_PER_OCTAVE = 2  # kinds by number of running requests


@dataclass(slots=True)
class _Speed:
    """The speed of the latest steps of a kind."""

    seen_at: int = 0
    total_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    longest_part_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def token_ms(self) -> float:
        """Medians of times: some steps compile kernels or capture graphs."""
        return median(self.total_ms) * len(self.tokens) / sum(self.tokens)

    @property
    def is_divisible(self) -> bool:
        """Whether there would be a gain, were half a step to take half of the time: never less of
        it than device or host are busy by themselves."""
        return median(self.longest_part_ms) < (1 - _MARGIN) * median(self.total_ms)


class TwoBatchOverlap:
    """Asked before each step, told of each one that decodes and does nothing else.

    A whole step takes about what the device and the host take one after the other; of two halves
    each takes what the busier of both does. But half a step is more than half of the work where
    the device reads all weights for either. So halves are tried where host and device both work
    for a part of a step, and kept where they emit more tokens a millisecond.
    """

    def __init__(self, overlap: Overlap, *, hides: bool) -> None:
        """``hides``: the device computes by itself; else there is nothing to gain."""
        self._overlap = overlap
        self._is_measured = hides and overlap is Overlap.auto
        self._speeds: dict[tuple[int, bool], _Speed] = {}  # by size and whether halved
        self._tries: dict[int, tuple[int, int]] = {}  # by size: step of the first, and how many
        self._size = -1
        self._halved = False
        self._unsettled = 0
        self._steps = 0

    def wants(self, running: int) -> bool:
        """Whether so many running requests are to be halved now. Asked once for each step."""
        self._steps += 1
        if running < 2 or self._overlap is Overlap.never:
            return False
        if self._overlap is Overlap.always:
            return True
        return self._is_measured and self._is_faster(_size(running))

    def observe(self, running: int, halved: bool, emitted: int, times: StepTimes) -> None:
        """A step, of all or of a half of ``running`` requests, emitted so many tokens."""
        if not self._is_measured:
            return
        size = _size(running)
        if (size, halved) != (self._size, self._halved):
            self._size, self._halved, self._unsettled = size, halved, _SETTLING
        if self._unsettled:
            self._unsettled -= 1
            return
        speed = self._speeds.setdefault((size, halved), _Speed())
        speed.seen_at = self._steps
        speed.total_ms.append(times.total)
        speed.longest_part_ms.append(max(times.forward, times.total - times.waited))
        speed.tokens.append(emitted)

    def _is_faster(self, size: int) -> bool:
        whole, halves = self._speed(size, False), self._speed(size, True)
        if whole is None:
            return False
        if halves is None:
            return whole.is_divisible and self._may_try(size)
        least = 1.0 if self._halved else 1.0 - _MARGIN
        return halves.token_ms < least * whole.token_ms

    def _may_try(self, size: int) -> bool:
        """Halves are never judged where steps with prompts come between all those that decode: then
        they are given up until whole steps could have become stale."""
        first, tries = self._tries.get(size, (self._steps, 0))
        if self._steps - first > _STALE:
            first, tries = self._steps, 0
        self._tries[size] = (first, tries + 1)
        return tries < _MAX_TRIES

    def _speed(self, size: int, halved: bool) -> _Speed | None:
        """None: not known, or no longer."""
        speed = self._speeds.get((size, halved))
        if speed is None:
            return None
        if self._steps - speed.seen_at > _STALE:
            del self._speeds[size, halved]
            return None
        return speed if len(speed.tokens) >= _KNOWN else None


def _size(running: int) -> int:
    return round(_PER_OCTAVE * math.log2(max(1, running)))
