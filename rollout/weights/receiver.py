"""Weight updates of one rank: sources are read into its models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.parallel import RankGroup
from rollout.validation import checked_int
from rollout.weights.disk_source import DiskSource
from rollout.weights.distributed import GroupSource
from rollout.weights.joined_groups import JoinedGroups
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.shared_memory import HandleReceiver, HandleSource
from rollout.weights.source import WeightSource, WeightTensors, not_a_source
from rollout.weights.transaction import WeightTransaction
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.update_options import UpdateOptions, refuse_options_of_part
from rollout.weights.weight_check import WeightCheck


class WeightReceiver:
    """Brings sources to one rank's models: whole updates, and updates of several calls.

    Ranks that run one model each have a receiver and make the same calls. A failure before the
    first byte leaves the old weights serving; a later one tears them until a full update.

    Args:
        device: of the groups that this rank joins with NCCL.
        ranks: the ranks that run one model.
        before_commit: called when all has been written, before it serves; given the update's
            options. What it raises ends the update.
    """

    def __init__(
        self,
        weights: WeightTransaction,
        device: torch.device,
        ranks: RankGroup,
        before_commit: Callable[[UpdateOptions], None] = lambda options: None,
    ) -> None:
        self.weights = weights
        self.check = WeightCheck(weights, ranks)
        self.groups = JoinedGroups()
        self.handles = HandleReceiver()
        self._device = device
        self._ranks = ranks
        self._before_commit = before_commit

    def begin(self, manifest: Manifest | None, options: Mapping[str, Any]) -> None:
        """Open an update that several calls bring. ``manifest``: all that is going to come.

        Raises InvalidInputError, and WeightUpdateError while another update is under way.
        """
        with self.weights.broadcast_failures(begins=True):
            if manifest is not None and not isinstance(manifest, Mapping):
                raise InvalidInputError("manifest", manifest, "must map names to TensorSpecs")
            for name, spec in (manifest or {}).items():
                if not isinstance(spec, TensorSpec):
                    raise InvalidInputError(f"manifest[{name!r}]", spec, "must be a TensorSpec")
            self.weights.begin(UpdateOptions.of(options), manifest)

    def update(self, source: WeightSource, options: Mapping[str, Any]) -> UpdateCounts | None:
        """One whole update, or a part of the one that is under way; returns None for a part.

        Raises InvalidInputError, WeightUpdateError, CheckpointError for a folder, and whatever the
        source raises.
        """
        weights = self.weights
        try:
            with weights.broadcast_failures(), self._opened(source, options) as tensors:
                if not weights.is_under_way:
                    return self._update(tensors, options)
                refuse_options_of_part(options)
                weights.load(tensors)
                return None
        finally:
            if isinstance(source, HandleSource):
                if not weights.is_under_way:
                    self.handles.release_devices()
                self._ranks.all_gather_int(0)  # the sender may refill what all have read

    def end(self, weight_version: int | None = None) -> UpdateCounts:
        """Commit the open update. ``weight_version``: for a caller that began without knowing it;
        one that is in use is refused, and the update stays open."""
        weights = self.weights
        self.handles.release_devices()
        if weight_version is not None:
            weights.renumber(checked_int(weight_version, "weight_version", minimum=0))
        if weights.is_loading:
            try:
                self._before_commit(weights.options)
            except BaseException as error:
                weights.abandon(f"leaving the old weights failed: {error}")
                raise
        return weights.commit()

    def abandon(self, reason: str) -> None:
        """Give up the open update, if there is one."""
        self.weights.abandon(reason)
        self.handles.release_devices()

    def decline(self, source: WeightSource, reason: str) -> None:
        """Take off the wire what the sender of a group announced."""
        with contextlib.suppress(WeightUpdateError), self._opened(source, {}):
            raise WeightUpdateError(reason)

    def init_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float,
    ) -> None:
        """Join a group that weights come through. Ranks that run one model take the ranks from
        ``rank_offset`` on: all join it, or none does."""
        first, size = checked_int(rank_offset, "rank_offset"), self._ranks.size
        if first < 1:
            raise InvalidInputError("rank_offset", first, "must be 1 or more: rank 0 is the sender")
        if first + size > checked_int(world_size, "world_size"):
            raise InvalidInputError(
                "world_size", world_size, f"must count {size} ranks from rank_offset={first} on"
            )
        failure: Exception | None = None
        try:
            self.groups.init(
                master_address, master_port, first + self._ranks.rank, world_size, group_name,
                backend, timeout, self._device,
            )  # fmt: skip
        except (RolloutError, OSError, TimeoutError) as error:
            failure = error
        failures = self._ranks.all_gather_text("" if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text:
                self.groups.destroy(group_name)
                raise WeightUpdateError(f"rank {rank}: {text}")

    def destroy_group(self, group_name: str) -> None:
        """Leave a group. Raises InvalidInputError for one this rank is not in."""
        self.groups.destroy(group_name)

    def close(self) -> None:
        """Leave the groups and let go of senders' memory; updates can go on as before."""
        self.groups.close()
        self.handles.release()

    def _update(self, tensors: WeightTensors, options: Mapping[str, Any]) -> UpdateCounts:
        expired = self.weights.expired
        try:
            self.weights.begin(UpdateOptions.of({**tensors.own_options, **options}), source=tensors)
            self.weights.load(tensors)
            return self.end()
        except RolloutError as error:
            if expired and not options:
                error.add_note(f"an update that was begun before has ended: {expired}")
            raise

    def _opened(
        self, source: WeightSource, options: Mapping[str, Any]
    ) -> AbstractContextManager[WeightTensors]:
        weights = self.weights
        is_part = weights.is_under_way
        match source:
            case DiskSource():
                given = weights.options if is_part else UpdateOptions.of(options)
                return source.opened(weights.parts, given)
            case GroupSource():
                timeout = weights.options.timeout if is_part else options.get("timeout")
                return self.groups.opened(source, timeout)
            case HandleSource():
                return self.handles.opened(source)
            case WeightTensors():
                return contextlib.nullcontext(source)
        raise not_a_source(source)
