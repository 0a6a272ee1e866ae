"""The weight groups that an engine has joined, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rollout.errors import InvalidInputError
from rollout.validation import checked_name, checked_seconds
from rollout.weights.distributed import DistributedSource, GroupSource
from rollout.weights.group import WeightGroup
from rollout.weights.source import WeightTensors


class JoinedGroups:
    """The groups that one engine is in."""

    def __init__(self) -> None:
        self._groups: dict[str, WeightGroup] = {}

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
    ) -> None:
        """Join a group as receiver. Raises what `WeightGroup` does, and InvalidInputError for a
        name that is taken."""
        if checked_name(group_name, "group_name") in self._groups:
            raise InvalidInputError("group_name", group_name, "is joined already: destroy it first")
        self._groups[group_name] = WeightGroup(
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
        """The tensors that the group's sender is about to send.

        ``timeout``: seconds, of each wait; None: what the group was joined with.
        """
        group = self._named(source.group_name)
        seconds = group.timeout if timeout is None else checked_seconds(timeout, "timeout")
        with DistributedSource(group, source, seconds) as tensors:
            yield tensors

    def destroy(self, group_name: str) -> None:
        """Leave a group. Raises InvalidInputError for one this engine is not in."""
        self._named(group_name).close()
        del self._groups[group_name]

    def close(self) -> None:
        """Leave every group."""
        for group_name in list(self._groups):
            self.destroy(group_name)

    def _named(self, group_name: str) -> WeightGroup:
        if checked_name(group_name, "group_name") not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise InvalidInputError(
                "group_name", group_name, f"is no group of this engine, which has: {known}"
            )
        return self._groups[group_name]
