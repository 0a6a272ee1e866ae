"""verl's way of weights to standalone replicas, over gloo: checkpoint_engine.backend=gloo.

verl's own (nccl, nixl, ...) need devices. The first trainer rank broadcasts, tensor by tensor; what
comes is announced in the store.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

TIMEOUT = timedelta(minutes=20)


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._updates = 0

    def prepare(self) -> tuple[str, int] | None:
        """The address that the master listens on."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address()
        if self._store is None:
            self._store = TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The first trainer rank is rank 0; the others send nothing and stay out (-1)."""
        size = 1 + rollout_world_size

        def kwargs(ranks: list[int]) -> dict[str, list[Any]]:
            address = [metadata[0]] * len(ranks)
            return {"rank": ranks, "world_size": [size] * len(ranks), "address": address}

        trainers = [0] + [-1] * (actor_wg_world_size - 1)
        return kwargs(trainers), kwargs(list(range(1, size)))

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        self._rank = rank
        if rank >= 0 and self._group is None:
            if self._store is None:
                self._store = TCPStore(*address, timeout=TIMEOUT)
            self._group = ProcessGroupGloo(
                PrefixStore("group", self._store), rank, world_size, TIMEOUT
            )

    def finalize(self) -> None:
        self._updates += 1

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Every rank takes all of ``weights``: gathering them is collective."""
        count = 0
        for count, (name, tensor) in enumerate(weights, start=1):
            if self._rank == 0:
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._announce(count - 1, [name, list(tensor.shape), dtype])
                self._broadcast(tensor.detach().contiguous())
        if self._rank == 0:
            self._announce(count, None)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        assert self._store is not None
        count = 0
        while (announced := json.loads(self._store.get(self._key(count)))) is not None:
            name, shape, dtype = announced
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._broadcast(tensor)
            yield name, tensor
            count += 1

    def _announce(self, index: int, what: list[Any] | None) -> None:
        assert self._store is not None
        self._store.set(self._key(index), json.dumps(what))

    def _key(self, index: int) -> str:
        return f"update {self._updates} tensor {index}"

    def _broadcast(self, tensor: torch.Tensor) -> None:
        assert self._group is not None
        self._group.broadcast(tensor, 0).wait()
