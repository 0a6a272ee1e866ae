"""Two-batch overlap: whether two halves of the running requests alternate on the device.

SGLang calls it TBO, vLLM DBO. It is on while it is measured to be faster.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from rollout.config import Overlap
from rollout.types import StepTimes

_MARGIN = 0.05  # share of whole steps' time that halves must save to be tried or switched on
_KNOWN = 8  # steps of a kind until its speed counts as known
_WINDOW = 16  # latest steps of a kind that count
_WARM_UP = 4  # first steps after a switch, which are not measured
_STALE = 1024  # steps after which the speed of a kind that did not run is forgotten
_MAX_TRIES = 4 * (_WARM_UP + _KNOWN)  # halved steps to try of a size whose speed stays unknown
_PER_OCTAVE = 2  # sizes per doubling of the running requests


@dataclass(slots=True)
class _Speed:
    """Times and tokens of the latest steps of a kind: a size, whole or halved."""

    seen_at: int = 0
    total_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    longest_part_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def token_ms(self) -> float:
        """Milliseconds per token, by the median time: some steps compile kernels or capture
        graphs."""
        return median(self.total_ms) * len(self.tokens) / sum(self.tokens)

    @property
    def is_divisible(self) -> bool:
        """Whether halves could pay: device and host each work clearly less than the whole step."""
        return median(self.longest_part_ms) < (1 - _MARGIN) * median(self.total_ms)


class TwoBatchOverlap:
    """Decides before each step whether to halve it; learns from steps that only decode.

    A whole step takes the device's time plus the host's. Each of two halves takes the longer of
    both. But half a step is more than half of the work, since the device reads all weights for
    either half. So halves are tried where host and device both work for only a part of a step, and
    stay where they emit more tokens per millisecond.
    """

    def __init__(self, overlap: Overlap, *, hides: bool) -> None:
        """``hides``: whether the device computes while the host works; otherwise nothing is
        gained."""
        self._overlap = overlap
        self._is_measured = hides and overlap is Overlap.auto
        self._speeds: dict[tuple[int, bool], _Speed] = {}  # by size and whether halved
        self._tries: dict[int, tuple[int, int]] = {}  # by size: step of the first, and how many
        self._size = -1
        self._halved = False
        self._warm_up_steps = 0
        self._steps = 0

    def wants(self, running: int) -> bool:
        """Whether to halve a step of ``running`` requests now. Must be asked once for each step."""
        self._steps += 1
        if running < 2 or self._overlap is Overlap.never:
            return False
        if self._overlap is Overlap.always:
            return True
        return self._is_measured and self._is_faster(_size(running))

    def observe(self, running: int, halved: bool, emitted: int, times: StepTimes) -> None:
        """Record a decoding step of all ``running`` requests, or of half of them if ``halved``.

        ``emitted``: its tokens.
        """
        if not self._is_measured:
            return
        size = _size(running)
        if (size, halved) != (self._size, self._halved):
            self._size, self._halved, self._warm_up_steps = size, halved, _WARM_UP
        if self._warm_up_steps:
            self._warm_up_steps -= 1
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
        bar = 1.0 if self._halved else 1.0 - _MARGIN
        return halves.token_ms < bar * whole.token_ms

    def _may_try(self, size: int) -> bool:
        """Whether to try halves of this size once more.

        Halves are never measured if steps with prompts interrupt every series of decoding steps.
        Then tries end until the speed of whole steps could have become stale.
        """
        first, tries = self._tries.get(size, (self._steps, 0))
        if self._steps - first > _STALE:
            first, tries = self._steps, 0
        self._tries[size] = (first, tries + 1)
        return tries < _MAX_TRIES

    def _speed(self, size: int, halved: bool) -> _Speed | None:
        """The speed of a kind, or None if it is unknown or stale."""
        speed = self._speeds.get((size, halved))
        if speed is None:
            return None
        if self._steps - speed.seen_at > _STALE:
            del self._speeds[size, halved]
            return None
        return speed if len(speed.tokens) >= _KNOWN else None


def _size(running: int) -> int:
    return round(_PER_OCTAVE * math.log2(max(1, running)))
