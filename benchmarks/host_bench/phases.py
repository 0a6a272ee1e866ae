"""Where the time of a step goes: each moment counts for the innermost phase under way."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any


class Phases:
    """``seconds`` by phase, since it was last cleared.

    Two counters of Python's clock and a dozen lines per call: about half a microsecond, which the
    phase around it pays.
    """

    def __init__(self, outermost: str) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = [outermost]
        self._since = time.perf_counter()
        self._originals: list[tuple[Any, str, Any]] = []

    def time_calls(self, owner: Any, name: str, phase: str) -> None:
        """From now on calls of ``owner.name`` count for ``phase``."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

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
        self.seconds[self._open[-1]] += now - self._since
        self._since = now
