"""Comparisons while a trainer runs, within a share of its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch import nn

from rollout.engine.engine import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.trainers.mismatch.compare import compare
from rollout.trainers.mismatch.result import Cause, Mismatch
from rollout.types import Rollout

_log = logging.getLogger(__name__)


class PeriodicProbe:
    """Compares one rollout at every ``every``-th step, as long as all comparisons together take no
    more than ``max_share`` of the time since the first step. The first one's is not known before.

    ``last``: the latest comparison. A suspect other than rounding is logged as a warning.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        every: int = 20,
        *,
        temperature: float = 1.0,
        max_share: float = 0.02,
    ) -> None:
        """``temperature``: that the trainer divides logits by.

        Raises InvalidInputError for ``every`` below 1 and a share outside 0 to 1.
        """
        if not isinstance(every, int) or every < 1:
            raise InvalidInputError("every", every, "must be a positive integer")
        if not 0 < max_share <= 1:
            raise InvalidInputError("max_share", max_share, "must be above 0 and at most 1")
        self.engine = engine
        self.last: Mismatch | None = None
        self._every, self._temperature, self._max_share = every, temperature, max_share
        self._steps, self._spent, self._longest = 0, 0.0, 0.0
        self._began: float | None = None

    def is_due(self) -> bool:
        """Count a step; whether to compare at it."""
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        self._steps += 1
        fits = self._spent + self._longest <= self._max_share * (now - self._began)
        return self._steps % self._every == 0 and fits

    def step(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Mismatch | None:
        """Count a step, and compare the first rollout with tokens if it is due. Call it after the
        sampling and before the optimizer's step, when trainer and engine have the same weights.

        Raises what `compare` does.
        """
        sampled = [rollout for rollout in rollouts if rollout.token_ids]
        return self.compare(model, sampled) if self.is_due() and sampled else None

    def compare(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Mismatch:
        """Compare now, whatever the time."""
        started = time.perf_counter()
        found = compare(model, self.engine, rollouts[:1], temperature=self._temperature)
        self.last = found
        seconds = time.perf_counter() - started
        self._spent, self._longest = self._spent + seconds, max(self._longest, seconds)
        for suspect in found.suspects[:1]:
            if suspect.cause is not Cause.ROUNDING:
                _log.warning("trainer and engine differ: %s: %s", suspect.cause, suspect.sentence)
        return found
