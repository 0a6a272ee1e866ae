"""The rollout of one of verl's trainer workers: the way to its replica's server."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from rollout.errors import InvalidInputError
from rollout.trainers.verl.options import server_name
from rollout.trainers.verl.weight_sender import WorkerWeights, send_weights


class ServerAdapter(BaseRollout):  # type: ignore[misc]  # verl is untyped here
    """A replica is one process, so every worker is the leader of its own."""

    is_leader_rank = True

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        """``replica_rank``: -1 in a hybrid worker, whose replica has the worker's own rank."""
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.sleep_level = 2
        self._handle: Any = None

    async def resume(self, tags: list[str]) -> None:
        """``tags``: weights, kv_cache."""
        if self.config.free_cache_engine:
            await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.config.free_cache_engine:
            await self._server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: WorkerWeights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Bring the server to the trainer's weights; ``weights`` run to their end.

        Raises InvalidInputError, and what the sending or the receiving end raises.
        """
        if wire_format != "named_tensors":
            raise InvalidInputError("wire_format", wire_format, "must be named_tensors")
        if kwargs.get("peft_config") is not None:
            remedy = "adapters are served merged: +actor_rollout_ref.model.lora.merge=True"
            raise InvalidInputError("peft_config", kwargs["peft_config"], remedy)
        megabytes = self.config.checkpoint_engine.update_weights_bucket_megabytes
        await send_weights(
            self._server, weights, global_steps=global_steps, bucket_bytes=megabytes << 20
        )

    @property
    def _server(self) -> Any:
        """Looked up late: hybrid workers exist before their server."""
        if self._handle is None:
            self._handle = ray.get_actor(server_name(self.replica_rank))
        return self._handle
