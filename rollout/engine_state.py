"""The engine's calls that say whether it may run: pausing, and what keeps it from running."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rollout.errors import EngineStateError, InvalidInputError
from rollout.scheduler import Scheduler
from rollout.types import PauseMode, Request, Rollout
from rollout.worker import Worker


class StateCalls(ABC):
    """A part of RolloutEngine."""

    worker: Worker
    scheduler: Scheduler
    is_paused: bool

    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Run nothing until `continue_generation`. Between two steps; again is the same as once.

        Args:
            mode: ``abort``: what is unfinished ends, with what it has. ``retract``: running
                requests give their KV back and wait. ``in_place``: they keep it.

        Requests can be submitted meanwhile; they wait.
        """
        try:
            mode = PauseMode(mode)
        except ValueError:
            known = ", ".join(PauseMode)
            raise InvalidInputError("mode", mode, f"must be one of {known}") from None
        if mode is PauseMode.ABORT:
            self._hand_out([self._end(request) for request in self.scheduler.abort_all()])
        elif mode is PauseMode.RETRACT:
            self.scheduler.retract_all()
        self.is_paused = True

    def continue_generation(self) -> None:
        self.is_paused = False

    @property
    def why_not(self) -> str:
        """Why no step can run now; empty when one can."""
        if self.is_paused:
            return "generation is paused: call continue_generation()"
        weights = self.worker.weights
        if weights.is_under_way and not weights.serves:
            return "a weight update is under way: call end_weight_update() when all of it has come"
        return "" if weights.serves else f"the weights are torn: {weights.reason}"

    @property
    def can_run(self) -> bool:
        return not self.why_not

    def require_running(self) -> None:
        """Raises EngineStateError while paused, WeightUpdateError while weights are not whole."""
        self.worker.weights.require_whole()
        if not self.can_run:
            raise EngineStateError(self.why_not)

    @abstractmethod
    def _hand_out(self, rollouts: list[Rollout]) -> None: ...

    @abstractmethod
    def _end(self, request: Request) -> Rollout: ...
