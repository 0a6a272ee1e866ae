"""What rank 0 tells the ranks that run the same rows of weights; each runs it by its own receiver.

What is wrong with a call is found on all ranks, which agree on the ends of an update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.parallel import RankGroup
from rollout.weights.disk_source import DiskSource
from rollout.weights.distributed import GroupSource
from rollout.weights.manifest import Manifest
from rollout.weights.rank_stream import RankStream, StreamSpec
from rollout.weights.receiver import WeightReceiver
from rollout.weights.shared_memory import HandleSource
from rollout.weights.source import WeightSource, WeightTensors, not_a_source
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.weight_check import Checksums


class WeightMessage(ABC):
    @abstractmethod
    def run(self, receiver: WeightReceiver) -> Any:
        """Make the call."""


@dataclass(frozen=True, slots=True)
class BeginUpdate(WeightMessage):
    manifest: Manifest | None
    options: Mapping[str, Any]

    def run(self, receiver: WeightReceiver) -> None:
        receiver.begin(self.manifest, self.options)


@dataclass(frozen=True, slots=True)
class EndUpdate(WeightMessage):
    weight_version: int | None

    def run(self, receiver: WeightReceiver) -> UpdateCounts:
        return receiver.end(self.weight_version)


@dataclass(frozen=True, slots=True)
class AbandonUpdate(WeightMessage):
    reason: str

    def run(self, receiver: WeightReceiver) -> None:
        receiver.abandon(self.reason)


@dataclass(frozen=True, slots=True)
class DeclineWeights(WeightMessage):
    source: WeightSource
    reason: str

    def run(self, receiver: WeightReceiver) -> None:
        receiver.decline(self.source, self.reason)


@dataclass(frozen=True, slots=True)
class JoinGroup(WeightMessage):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout: float

    def run(self, receiver: WeightReceiver) -> None:
        receiver.init_group(
            self.master_address, self.master_port, self.rank_offset, self.world_size,
            self.group_name, self.backend, self.timeout,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LeaveGroup(WeightMessage):
    group_name: str

    def run(self, receiver: WeightReceiver) -> None:
        receiver.destroy_group(self.group_name)


@dataclass(frozen=True, slots=True)
class DigestWeights(WeightMessage):
    selector: str

    def run(self, receiver: WeightReceiver) -> str:
        return receiver.weights.digest(self.selector)


@dataclass(frozen=True, slots=True)
class CheckWeights(WeightMessage):
    action: str
    selector: str
    skip: Sequence[str]

    def run(self, receiver: WeightReceiver) -> list[Checksums]:
        return receiver.check.run(self.action, self.selector, self.skip)


@dataclass(frozen=True, slots=True)
class ReadWeights(WeightMessage):
    names: Sequence[str]

    def run(self, receiver: WeightReceiver) -> dict[str, torch.Tensor]:
        return dict(receiver.weights.parts.read(self.names))


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """``source``: what each rank reads; a `StreamSpec`: what rank 0 sends."""

    source: WeightSource | StreamSpec
    options: Mapping[str, Any]

    def run(self, receiver: WeightReceiver, group: RankGroup) -> UpdateCounts | None:
        """Take them, on a rank other than the first."""
        if isinstance(self.source, StreamSpec):
            with RankStream(group, self.source).shared() as stream:
                return receiver.update(stream, self.options)
        return receiver.update(self.source, self.options)


def readable_by_all(source: WeightSource, group: RankGroup) -> WeightSource:
    """What rank 0 hands to all ranks in place of a source.

    Raises what the source's ``manifest`` does, InvalidInputError for handles to come and for what
    is no source.
    """
    match source:
        case WeightTensors():
            return RankStream.from_rank_0(group, source)
        case HandleSource():
            source.require_list()
        case DiskSource() | GroupSource():
            pass
        case _:
            raise not_a_source(source)
    return source
