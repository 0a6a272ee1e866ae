"""The rollout of one of verl's workers: the way to its replica's server, on its host."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from rollout.errors import InvalidInputError
from rollout.trainers.verl.options import NAME, server_name
from rollout.weights.adapter_folder import adapter_scaling, update_name
from rollout.weights.cuda_ipc import CudaIpcSender
from rollout.weights.shared_memory import SharedMemorySender

SEGMENTS = 4
"""Segments of shared memory. Where sender and two ranks shared two cores, an update took 1.5 times
as long as one to one rank with two segments, and 1.05 times with four."""


class ServerAdapter(BaseRollout):  # type: ignore[misc]  # verl is untyped here
    """A replica has a worker for each of its ranks; the first of them is the leader, which alone
    calls the server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        """``replica_rank``: -1 in a hybrid worker, whose group is split among replicas."""
        super().__init__(config, model_config, device_mesh)
        replica, rank = divmod(int(os.environ["RANK"]), config.tensor_model_parallel_size)
        self.replica_rank = replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank == 0
        self.sleep_level = 2
        own = config.engine_kwargs.get(NAME) or {}
        self._by_ipc = bool(own.get("cuda_ipc", False))
        if own.get("exact_training"):
            from rollout.trainers.verl.exact import train_exactly

            train_exactly()
        self._handle: Any = None
        self._shared: SharedMemorySender | None = None  # kept: new segments take as long as a copy

    async def resume(self, tags: list[str]) -> None:
        """``tags``: weights, kv_cache."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Give the server's memory back."""
        if self.config.free_cache_engine and self.is_leader_rank:
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
        if not self.is_leader_rank:
            async for _ in _each(weights):
                pass  # take part in gathering what the leader sends
            return
        options: dict[str, Any] = {}
        if (peft_config := kwargs.get("peft_config")) is not None:
            # verl sends the base by itself, once, unless the server has read it.
            if kwargs.get("base_sync_done"):
                options["lora_scaling"] = adapter_scaling(peft_config)
            weights = _renamed(weights)
        sender = self._sender()
        try:
            await send_weights(self._server, weights, sender, global_steps=global_steps, **options)
        finally:
            if sender is not self._shared:
                sender.close()  # the trainer's GPU has other uses for it

    def _sender(self) -> Sender:
        """CUDA IPC if that is asked for, else shared memory."""
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        if self._by_ipc:
            return CudaIpcSender(bucket_bytes, torch.device("cuda", torch.cuda.current_device()))
        if self._shared is None:
            self._shared = SharedMemorySender(bucket_bytes, num_segments=SEGMENTS)
        return self._shared

    @property
    def _server(self) -> Any:
        """The server's handle, looked up late: hybrid workers exist before their server."""
        if self._handle is None:
            self._handle = ray.get_actor(server_name(self.replica_rank))
        return self._handle


Sender = SharedMemorySender | CudaIpcSender
WorkerWeights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


async def _each(weights: WorkerWeights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterator):
        async for named_tensor in weights:
            yield named_tensor
    else:
        for named_tensor in weights:
            yield named_tensor


async def _renamed(weights: WorkerWeights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """The tensors of a model with adapters by the names that updates know them by."""
    async for name, tensor in _each(weights):
        yield update_name(name).replace(".base_layer.", "."), tensor


async def send_weights(
    server: Any,
    weights: WorkerWeights,
    sender: Sender,
    *,
    global_steps: int | None,
    lora_scaling: float | None = None,
) -> None:
    """One update of ``server``, a Ray actor, as one transaction; ``weights`` run to their end.

    Taking the next tensor may be a collective of all ranks. So where the server fails, what is left
    is taken all the same before its error is raised. Where ``weights`` fail, the server is told,
    and serves nothing until a later update succeeds.

    ``sender``: packs them; those of its buffers that are free are filled while others are read.
    ``lora_scaling``: the weights are LoRA adapters, scaled so.
    """
    update = _Update(server)
    await update.call("begin_weight_update", lora_scaling)
    try:
        loading: deque[Any] = deque()
        try:
            async for handle in _handles(sender, weights):
                loading.append(update.start("load_weights", handle))
                if len(loading) == sender.num_buffers:  # the next takes the first one's place
                    await update.wait(loading[0])
                    loading.popleft()
        finally:  # they read what the sender may free
            for each in loading:
                await update.wait(each)
    except BaseException as error:
        await update.call("abandon_weight_update", f"the sending worker failed: {error!r}")
        raise
    await update.call("end_weight_update", global_steps)
    if update.failure is not None:
        raise update.failure


class _Update:
    """A series of calls to the server, which ends with the first that fails."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.failure: Exception | None = None

    def start(self, method: str, *arguments: Any) -> Any:
        """Start a call; what is returned is to be awaited. None after a failure."""
        if self.failure is None:
            return getattr(self._server, method).remote(*arguments)
        return None

    async def wait(self, started: Any) -> None:
        try:
            if started is not None:
                await started
        except Exception as error:
            self.failure = self.failure or error

    async def call(self, method: str, *arguments: Any) -> None:
        await self.wait(self.start(method, *arguments))


async def _handles(sender: Sender, weights: WorkerWeights) -> AsyncIterator[dict[str, Any]]:
    if not isinstance(weights, AsyncIterator):
        for handle in sender.handles(weights):
            yield handle
        return
    device = sender.device if isinstance(sender, CudaIpcSender) else torch.device("cpu")
    async for some in _copied(weights, sender.bucket_bytes, device):
        for handle in sender.handles(some):
            yield handle


async def _copied(
    weights: AsyncIterator[tuple[str, torch.Tensor]], num_bytes: int, device: torch.device | None
) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
    """Copies of the tensors on a device, in lists of about ``num_bytes``."""
    some: list[tuple[str, torch.Tensor]] = []
    size = 0
    async for name, tensor in weights:
        if some and size + tensor.nbytes > num_bytes:
            yield some
            some, size = [], 0
        some.append((name, tensor.detach().to(device, copy=True)))
        size += tensor.nbytes
    if some:
        yield some
