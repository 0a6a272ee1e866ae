"""OpenRLHF's weight updates, one remote call per parameter, each as one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rollout.engine.engine import RolloutEngine
from rollout.errors import EngineStateError
from rollout.trainers.openrlhf.stand_ins import GROUP
from rollout.trainers.served_engine import ServedEngine


class Communicator(Protocol):
    """The receiving end of an installed vLLM's group; rank 0 sends."""

    device: torch.device

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Receive into ``tensor``, which is on the communicator's device."""
        ...


class ParameterReceiver:
    """Begins an update with its first parameter and commits it with its last.

    The engine serves nothing in between. An update that fails, or of which nothing comes for
    ``timeout`` seconds, leaves it refusing: see `ServedEngine`.
    """

    def __init__(self, engine: ServedEngine, *, timeout: float, keep_kv: bool) -> None:
        self._engine = engine
        self._timeout = timeout
        self._keep_kv = keep_kv
        self._take: Callable[[RolloutEngine, str, torch.dtype, tuple[int, ...]], None] | None = None
        self._silence: asyncio.Task[None] | None = None

    async def join(
        self, address: str, port: int, rank_offset: int, world_size: int, backend: str
    ) -> None:
        """Join the trainer's group with all ranks of the engine, and receive updates through it."""

        def join(engine: RolloutEngine) -> None:
            engine.init_weights_update_group(
                address, port, rank_offset, world_size, GROUP, backend, self._timeout
            )

        def take(
            engine: RolloutEngine, name: str, dtype: torch.dtype, shape: tuple[int, ...]
        ) -> None:
            engine.update_weights_from_distributed([name], [dtype], [shape], GROUP)

        await self._engine.call(join)
        self._take = take

    def receive_from(self, group: Communicator) -> None:
        """Receive updates through an installed vLLM's group."""

        def take(
            engine: RolloutEngine, name: str, dtype: torch.dtype, shape: tuple[int, ...]
        ) -> None:
            tensor = torch.empty(shape, dtype=dtype, device=group.device)
            group.broadcast(tensor, src=0)
            engine.update_weights_from_tensor([(name, tensor)])

        self._take = take

    async def receive(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], *, is_last: bool
    ) -> None:
        """Take part in the broadcast of one parameter.

        Raises InvalidInputError for a parameter the model has no place for, WeightUpdateError when
        the sender is gone; the update has failed then.
        """
        take = self._take
        if take is None:
            raise EngineStateError("init_process_group() comes before update_weight()")
        if self._silence is not None:
            self._silence.cancel()

        def load(engine: RolloutEngine) -> None:
            if not engine.is_updating_weights:
                engine.begin_weight_update(timeout=self._timeout, flush_cache=not self._keep_kv)
            try:
                take(engine, name, dtype, tuple(shape))
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
