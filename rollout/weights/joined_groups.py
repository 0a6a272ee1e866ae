"""The weight groups that an engine has joined, by name; foreign trainers have one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rollout.errors import InvalidInputError
from rollout.validation import checked_name, checked_seconds
from rollout.weights.distributed import DistributedSource, GroupSource
from rollout.weights.group import BroadcastGroup, WeightGroup
from rollout.weights.group_store import GroupStore
from rollout.weights.source import WeightTensors

_DEVICE_TYPES = {"gloo": "cpu", "nccl": "cuda"}  # under which torch keeps a backend's keys


class TorchGroup(BroadcastGroup):
    """A receiver in the group a trainer makes with ``init_method="tcp://address:port"``.

    Trainers written for other engines make a group of torch's by its own rendezvous, with a name
    and beside their default one, and broadcast. What has to be the same here is where torch puts
    that group's keys in the store, which is tested against torch itself.

    The trainer's rank 0 hosts the store and waits in it for every member. Nobody leaves notes, so
    such a sender cannot be told of a refusal. With nccl the members connect in the first broadcast,
    which no timeout ends.
    """

    def _meet(self, store: TCPStore | None) -> None:
        store = store or self._connect(self.world_size)
        self.notes = GroupStore(store, self.name)
        keys = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))
        self._group = self._process_group(
            PrefixStore(f"{_DEVICE_TYPES[self.backend]}/", keys), self.timeout
        )


_SENDERS = {"specrollout": WeightGroup, "torch": TorchGroup}


class JoinedGroups:
    """The groups that one engine is in."""

    def __init__(self) -> None:
        self._groups: dict[str, BroadcastGroup] = {}

    def init(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float,
        device: torch.device | None = None,
        sender: str = "specrollout",
    ) -> None:
        """Join a group as receiver.

        ``sender``: ``specrollout`` where rank 0 is a `WeightGroup`, ``torch`` where it knows
        nothing but torch's own groups. Raises what `WeightGroup` and `TorchGroup` do, and
        InvalidInputError for a name that is taken.
        """
        if checked_name(group_name, "group_name") in self._groups:
            raise InvalidInputError("group_name", group_name, "is joined already: destroy it first")
        if checked_name(sender, "sender") not in _SENDERS:
            raise InvalidInputError("sender", sender, f"must be one of {', '.join(_SENDERS)}")
        self._groups[group_name] = _SENDERS[sender](
            master_address=master_address,
            master_port=master_port,
            rank=rank,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            device=device,
            timeout=timeout,
        )

    @contextmanager
    def opened(self, source: GroupSource, timeout: float | None) -> Iterator[WeightTensors]:
        """The tensors that the group's sender is about to send; it hears how it went.

        ``timeout``: seconds, of each wait; None: what the group was joined with.
        """
        group = self._named(source.group_name)
        seconds = group.timeout if timeout is None else checked_seconds(timeout, "timeout")
        with DistributedSource(group, load_format=source.load_format, timeout=seconds) as tensors:
            tensors.expect(source.manifest())
            yield tensors

    def num_bytes(self, group_name: str) -> int:
        """Bytes that have come through a group. Raises InvalidInputError for an unknown one."""
        return self._named(group_name).num_bytes

    def destroy(self, group_name: str) -> None:
        """Leave a group. Raises InvalidInputError for one this engine is not in."""
        self._named(group_name).close()
        del self._groups[group_name]

    def close(self) -> None:
        """Leave every group."""
        for group_name in list(self._groups):
            self.destroy(group_name)

    def _named(self, group_name: str) -> BroadcastGroup:
        if checked_name(group_name, "group_name") not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise InvalidInputError(
                "group_name", group_name, f"is no group of this engine, which has: {known}"
            )
        return self._groups[group_name]
