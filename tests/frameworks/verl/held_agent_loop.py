"""An agent loop whose rollouts are cut by an update of the weights: agent_loop_config_path."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import ray
from hold import hold
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from rollout.trainers.verl.options import server_name

BATCH = 8 * 4  # samples of a training step
STANDALONE = 1  # the replica's rank: that of the trainer's workers is 0


class HeldAgentLoop(SingleTurnAgentLoop):  # type: ignore[misc]  # verl is untyped here
    """verl's single turn. The standalone replica holds the batch of the second step until an update
    cuts it.

    Each batch begins when the one before has ended: with one of warm-up, the trainer has its second
    batch before the third begins. The state is that of the one agent worker.
    """

    begun: ClassVar[int] = 0
    ended: ClassVar[int] = 0
    changed: ClassVar[asyncio.Condition] = asyncio.Condition()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        batch, sample = divmod(self.begun, BATCH)
        type(self).begun += 1
        async with self.changed:
            await self.changed.wait_for(lambda: self.ended >= batch * BATCH)
        if (batch, sample) == (2, 0):
            await asyncio.to_thread(hold, ray.get_actor(server_name(STANDALONE)))
        try:
            return await super().run(sampling_params, **kwargs)
        finally:
            async with self.changed:
                type(self).ended += 1
                self.changed.notify_all()
