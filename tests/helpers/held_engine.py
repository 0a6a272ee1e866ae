"""An engine that waits at a given step, so that what comes meanwhile does not race it."""

from __future__ import annotations

import threading
from itertools import count

from rollout import Rollout, RolloutEngine
from tests.helpers.hang import HANG_SECONDS


class HeldEngine:
    """After its ``steps``-th step from now the engine sets ``waits`` and waits for ``go_on``."""

    def __init__(self, steps: int) -> None:
        self.waits = threading.Event()
        self.go_on = threading.Event()
        self._steps = steps

    def hold(self, engine: RolloutEngine) -> None:
        """To be called by the thread that runs the engine."""
        step, steps = engine.step, count(1)

        def held() -> list[Rollout]:
            ended = step()
            if next(steps) == self._steps:
                self.waits.set()
                assert self.go_on.wait(HANG_SECONDS)
            return ended

        engine.step = held  # type: ignore[method-assign]
