"""Gates that open and close as no learned one would."""

from __future__ import annotations

import numpy as np

from spec_workers.budget.gate import Gate


class FlickeringGate(Gate):
    """Opens and closes at random: between steps, or even within one."""

    def __init__(self, seed: int, *, within: bool) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self._within = within
        self._open = True

    @property
    def is_open(self) -> bool:
        return bool(self._random.random() < 0.5) if self._within else self._open

    @property
    def may_draft(self) -> bool:
        return self.is_open

    def enter(self, width) -> None:
        pass

    def observe(self, width, gained_ms, plain_ms) -> None:
        self._open = bool(self._random.random() < 0.6)

    def skip(self, width) -> None:
        self._open = bool(self._random.random() < 0.6)


class ShutGate(Gate):
    may_draft = is_open = False

    def enter(self, width) -> None:
        pass

    def skip(self, width) -> None:
        pass
