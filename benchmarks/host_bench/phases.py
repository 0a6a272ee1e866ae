"""Where the time of a step goes: each moment counts for the innermost phase under way."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

COVERED = ", while the device computes"
"""Ends the name of a phase's other share."""


class Phases:
    """``seconds`` by phase, since it was last cleared; what the device covers by itself.

    Two counters of Python's clock and a dozen lines per call: about half a microsecond, which the
    phase around it pays.
    """

    def __init__(self, outermost: str) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = [outermost]
        self._is_covered = False  # the device computes
        self._since = time.perf_counter()
        self._originals: list[tuple[Any, str, Any]] = []

    def time_calls(
        self, owner: Any, name: str, phase: str, *, waits: bool = False, launches: bool = False
    ) -> None:
        """From now on calls of ``owner.name`` count for ``phase``.

        Args:
            waits: for the device, which is done when a call begins.
            launches: what the device computes from the end of a call on.
        """
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            self._is_covered = self._is_covered and not waits
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()
                self._is_covered = self._is_covered or launches

        self._originals.append((owner, name, function))
        setattr(owner, name, timed)

    def stop(self) -> None:
        """Everything is called as before."""
        for owner, name, function in reversed(self._originals):
            setattr(owner, name, function)

    def enter(self, phase: str) -> None:
        self._turn()
        self._open.append(phase)

    def leave(self) -> None:
        self._turn()
        self._open.pop()

    def take(self) -> dict[str, float]:
        """What came together since it was last asked."""
        self._turn()
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _turn(self) -> None:
        now = time.perf_counter()
        name = self._open[-1]
        self.seconds[name + COVERED if self._is_covered else name] += now - self._since
        self._since = now
