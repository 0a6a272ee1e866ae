"""The group over which OpenRLHF broadcasts parameters, where vllm is not installed.

OpenRLHF makes it of two classes of vLLM's on both sides, the trainer's rank 0 and each engine.
These have their names and calls, over a `WeightGroup`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from rollout.errors import InvalidInputError
from rollout.weights.group import WeightGroup

BACKEND_VARIABLE = "SPECROLLOUT_SYNC_BACKEND"
TIMEOUT_VARIABLE = "SPECROLLOUT_SYNC_TIMEOUT"
"""Environment of every Ray worker, set by the launcher: OpenRLHF's trainer hands neither over."""


@dataclass(frozen=True, slots=True)
class StatelessProcessGroup:
    """Where ``world_size`` processes are going to meet; rank 0 is the trainer."""

    host: str
    port: int
    rank: int
    world_size: int

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        return cls(host, port, rank, world_size)


class PyNcclCommunicator:
    """Broadcasts by ``--vllm.sync_backend``: nccl, or gloo, which goes through host memory.

    Made by all of them at once: returns when they have met. Raises WeightUpdateError where they do
    not within ``--specrollout.sync_timeout``.
    """

    def __init__(self, group: StatelessProcessGroup, device: object) -> None:
        """``device``: of the tensors; with nccl this process's current one."""
        self._group = WeightGroup(
            master_address=group.host,
            master_port=group.port,
            rank=group.rank,
            world_size=group.world_size,
            group_name="openrlhf",
            backend=os.environ[BACKEND_VARIABLE],
            timeout=float(os.environ[TIMEOUT_VARIABLE]),
        )
        self.device = self._group.device  # where a receiver's tensors must be

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        """From rank 0 into ``tensor`` of the others. ``stream``: it is there on return, on any.

        Raises WeightUpdateError when another process is gone or the time is over; the group is
        closed then.
        """
        if src != 0:
            raise InvalidInputError("src", src, "must be 0: the trainer sends")
        self._group.broadcast(tensor.detach().to(self.device).contiguous())
