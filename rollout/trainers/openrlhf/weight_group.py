"""The process group over which OpenRLHF broadcasts parameters, without vllm.

Two classes with the names and calls of vLLM's, which OpenRLHF makes on both sides: a store of its
own and a torch process group over it, so the trainer's default group is not touched.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as dist

BACKEND_VARIABLE = "SPECROLLOUT_SYNC_BACKEND"
TIMEOUT_VARIABLE = "SPECROLLOUT_SYNC_TIMEOUT"
"""Environment of every Ray worker, set by the launcher: OpenRLHF's trainer hands neither over."""


class StatelessProcessGroup:
    """Where ``world_size`` processes meet. Rank 0, the trainer, keeps the store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        timeout = timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, "300")))
        store = dist.TCPStore(
            host, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        return cls(store, rank, world_size, timeout)


class PyNcclCommunicator:
    """Broadcasts among the processes of a group: nccl, or gloo where ``--vllm.sync_backend`` says.

    Made by all of them at once: returns when they have met.
    """

    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        backend = os.environ.get(BACKEND_VARIABLE, "nccl")
        arguments = (dist.PrefixStore("weights", group.store), group.rank, group.world_size)
        self._store = group.store  # kept open by whoever hosts it
        self._group: Any
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(*arguments, group.timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = group.timeout
            self._group = dist.ProcessGroupNCCL(*arguments, options)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        """From rank ``src`` into ``tensor`` of the others. ``stream``: the current one, as torch's
        groups take it. Raises RuntimeError when another process is gone or the time is over."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        self._group.broadcast([tensor.contiguous()], options).wait()
