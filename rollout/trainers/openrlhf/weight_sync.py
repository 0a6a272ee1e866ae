"""OpenRLHF's weight updates, one remote call per parameter, each as one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rollout.engine.engine import RolloutEngine
from rollout.errors import EngineStateError
from rollout.trainers.served_engine import ServedEngine


class Communicator(Protocol):
    """The receiving end of OpenRLHF's group, vLLM's or our stand-in; rank 0 sends."""

    device: torch.device

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Receive into ``tensor``, which is on the communicator's device."""
        ...


class WeightSync:
    """Begins an update with its first parameter and commits it with its last.

    The engine serves nothing in between. An update that fails, or of which nothing comes for
    ``timeout`` seconds, leaves it refusing: see `ServedEngine`.
    """

    def __init__(self, engine: ServedEngine, *, timeout: float, keep_kv: bool) -> None:
        self._engine = engine
        self._timeout = timeout
        self._keep_kv = keep_kv
        self._group: Communicator | None = None
        self._silence: asyncio.Task[None] | None = None

    def join(self, group: Communicator) -> None:
        """Receive updates through this group from now on."""
        self._group = group

    async def receive(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], *, is_last: bool
    ) -> None:
        """Take part in the broadcast of one parameter.

        Raises InvalidInputError for a parameter the model has no place for, WeightUpdateError when
        the sender is gone; the update has failed then.
        """
        group = self._group
        if group is None:
            raise EngineStateError("init_process_group() comes before update_weight()")
        if self._silence is not None:
            self._silence.cancel()

        def load(engine: RolloutEngine) -> None:
            weights = engine.worker.weights
            if not weights.is_under_way:
                engine.begin_weight_update(timeout=self._timeout, flush_cache=not self._keep_kv)
            try:
                tensor = torch.empty(tuple(shape), dtype=dtype, device=group.device)
                group.broadcast(tensor, src=0)
                engine.update_weights_from_tensor([(name, tensor)])
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
