"""OpenRLHF's weight updates, one remote call per parameter, each as one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from rollout.engine.engine import RolloutEngine
from rollout.trainers.openrlhf.stand_ins import GROUP
from rollout.trainers.served_engine import ServedEngine


class ParameterReceiver:
    """Begins an update with its first parameter and commits it with its last.

    The engine serves nothing in between. An update that fails, or brings nothing for
    ``timeout`` seconds, leaves it refusing: see `ServedEngine`.
    """

    def __init__(self, engine: ServedEngine, *, timeout: float, keep_kv: bool) -> None:
        self._engine = engine
        self._timeout = timeout
        self._keep_kv = keep_kv
        self._silence: asyncio.Task[None] | None = None

    async def join(
        self, address: str, port: int, rank_offset: int, world_size: int, backend: str
    ) -> None:
        """Join the trainer's group with all ranks of the engine."""
        await self._engine.call(
            lambda engine: engine.init_weights_update_group(
                address, port, rank_offset, world_size, GROUP, backend, self._timeout
            )
        )

    async def receive(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], *, is_last: bool
    ) -> None:
        """Take part in the broadcast of one parameter.

        Raises InvalidInputError for a parameter the model has no place for, WeightUpdateError when
        the sender is gone; the update has failed then.
        """
        if self._silence is not None:
            self._silence.cancel()

        def load(engine: RolloutEngine) -> None:
            if not engine.is_updating_weights:
                engine.begin_weight_update(timeout=self._timeout, flush_cache=not self._keep_kv)
            try:
                engine.update_weights_from_distributed([name], [dtype], [tuple(shape)], GROUP)
                if is_last:
                    engine.end_weight_update()
            except BaseException as error:
                engine.abandon_weight_update(f"{name} failed: {error}")
                raise

        await self._engine.update(load)
        if is_last:
            self._engine.refusal = ""
        else:
            self._silence = asyncio.create_task(self._give_up_when_silent())

    async def _give_up_when_silent(self) -> None:
        await asyncio.sleep(self._timeout)
        reason = f"no parameter came for {self._timeout:g} seconds"
        await self._engine.call(lambda engine: engine.abandon_weight_update(reason))
        await self._engine.refuse_if_torn()
