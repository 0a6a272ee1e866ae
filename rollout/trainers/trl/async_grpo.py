"""The parts for trl.experimental.async_grpo; apart, for TRL warns whoever imports that."""

from collections.abc import Iterator

import torch

from rollout.engine.engine_loop import EngineLoop
from rollout.errors import InvalidInputError
from rollout.trainers.trl.rollout_worker import RolloutWorker
from rollout.types import PauseMode

__all__ = ["RolloutWorker", "WeightTransfer"]


class WeightTransfer:
    """Sends weights to the engine, each update as one transaction between two steps.

    Rollouts in flight go on under the new weights: with mode ``in_place`` they keep their KV, with
    ``retract`` it is recomputed. ``partial`` allows updates without some of the model's tensors:
    TRL sends what it trains and no frozen parameter.

    A failed update is raised where TRL sends the weights; the engine then refuses to generate until
    a full one succeeds. Its iterator runs on the engine's thread; what a failure leaves of it, on
    the caller's.
    """

    def __init__(
        self, loop: EngineLoop, *, mode: PauseMode | str = PauseMode.IN_PLACE, partial: bool = False
    ) -> None:
        if mode not in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            raise InvalidInputError(
                "mode", mode, "must be in_place or retract: aborted rollouts would be lost"
            )
        self._loop = loop
        self._mode = PauseMode(mode)
        self._partial = partial

    def init_weight_transfer(self) -> None:
        """Nothing is set up: the engine is in this process."""

    def pause(self) -> None:
        """Pause generation, as the mode says."""
        self._loop.call(lambda engine: engine.pause_generation(self._mode)).result()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take all of ``iterator``; its tensors are not used once the update has failed."""
        tensors = (named for named in iterator)  # closing it leaves the rest in the iterator
        try:
            self._loop.call(
                lambda engine: engine.update_weights_from_tensor(
                    tensors,
                    flush_cache=self._mode is PauseMode.RETRACT,
                    partial=self._partial,
                )
            ).result()
        except Exception:
            for _ in iterator:  # each may be a collective, which the trainer's other ranks run too
                pass
            raise

    def resume(self) -> None:
        """End the pause."""
        self._loop.call(lambda engine: engine.continue_generation()).result()

    def destroy(self) -> None:
        """Nothing to release: the loop is its maker's."""
