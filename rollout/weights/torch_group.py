"""A weight group whose rank 0 is a trainer that knows nothing of us.

Trainers written for other engines make a group of torch's by its own rendezvous, with a name and
beside their default one, and broadcast. What has to be the same here is where torch puts that
group's keys in the store, which is tested against torch itself.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rollout.checked import checked_int
from rollout.errors import WeightUpdateError
from rollout.parallel.time_limit import answered
from rollout.weights.group import BroadcastGroup
from rollout.weights.group_store import GroupStore

_DEVICE_TYPES = {"gloo": "cpu", "nccl": "cuda"}  # under which torch keeps a backend's keys


class TorchGroup(BroadcastGroup):
    """A receiver in the group a trainer makes with ``init_method="tcp://address:port"``.

    The trainer's rank 0 hosts the store and waits in it for every member. Nobody leaves notes, so
    such a sender cannot be told of a refusal.

    Args:
        timeout: seconds; for joining, and the default for every wait after. With nccl the members
            connect in the first broadcast, which no timeout ends.

    Raises WeightUpdateError where the others do not come in time, InvalidInputError for arguments.
    """

    def __init__(
        self,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        device: torch.device | None,
        timeout: float,
    ) -> None:
        super().__init__(
            rank=rank,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            device=device,
            timeout=timeout,
        )
        checked_int(master_port, "master_port", minimum=1, maximum=65535)

        def connect() -> TCPStore:
            # With the size, so that this member is counted: rank 0 waits for all of them.
            return TCPStore(
                master_address, master_port, world_size, False,
                timeout=timedelta(seconds=self.timeout),
            )  # fmt: skip

        try:
            store = answered(connect, self.timeout)
        except (RuntimeError, TimeoutError) as error:
            raise WeightUpdateError(
                f"group {self.name!r}: the store at {master_address}:{master_port} cannot be "
                f"reached; rank 0 is missing ({str(error).splitlines()[0]})"
            ) from error
        self.notes = GroupStore(store, self.name)
        keys = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))
        self._group = self._process_group(
            PrefixStore(f"{_DEVICE_TYPES[self.backend]}/", keys), self.timeout
        )
