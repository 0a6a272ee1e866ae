"""Weight updates between two steps of an engine, and reads of its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollout.engine.step_runner import StepRunner
from rollout.engine.worker import Worker
from rollout.errors import InvalidInputError
from rollout.validation import checked_int, checked_iterable, checked_name, checked_path
from rollout.weights.bucket import FlattenedBucket, PackedBucket, buckets
from rollout.weights.bucket_layout import BucketLayout
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.rank_messages import (
    AbandonUpdate,
    BeginUpdate,
    CheckWeights,
    DeclineWeights,
    DigestWeights,
    EndUpdate,
    JoinGroup,
    LeaveGroup,
    ReadWeights,
    TakeWeights,
    WeightMessage,
    readable_by_all,
)
from rollout.weights.rank_stream import RankStream
from rollout.weights.receiver import WeightReceiver
from rollout.weights.source import WeightSource
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.update_options import UpdateOptions
from rollout.weights.weight_check import Checksums

_MAX_VALUES = 1 << 24  # of a tensor that is looked at, as they become a list
_RAISED_BY_ALL = (Exception,)
"""Errors of updates, on whose ends all ranks agree; an interrupt ends the ranks."""


class EngineWeights:
    """The weights of an engine, updated between two steps; `RolloutEngine` documents the calls.

    What the old weights computed goes before new ones serve, whatever happens in between.
    """

    def __init__(self, worker: Worker, steps: StepRunner) -> None:
        self.receiver = WeightReceiver(
            worker.weights, worker.model_device, worker.ranks.all, self._leave_old_weights
        )
        self._worker = worker
        self._steps = steps

    def update(self, source: WeightSource, options: Mapping[str, Any]) -> UpdateCounts | None:
        counts = self._taken(source, options)
        if counts is not None:
            self._serve_new_weights()
        return counts

    def _taken(self, source: WeightSource, options: Mapping[str, Any]) -> UpdateCounts | None:
        ranks = self._worker.ranks
        if not ranks.leader.is_followed:
            return self.receiver.update(source, options)
        shared = readable_by_all(source, ranks.tensor)
        if not isinstance(shared, RankStream):
            with ranks.telling(TakeWeights(shared, options), _RAISED_BY_ALL):
                return self.receiver.update(shared, options)
        with ranks.telling(TakeWeights(shared.spec, options), _RAISED_BY_ALL), shared.shared():
            return self.receiver.update(shared, options)

    def begin_update(self, manifest: Manifest | None, options: Mapping[str, Any]) -> None:
        self._on_all(BeginUpdate(manifest, options))

    def end_update(self, weight_version: int | None) -> UpdateCounts:
        counts: UpdateCounts = self._on_all(EndUpdate(weight_version))
        self._serve_new_weights()
        return counts

    def abandon_update(self, reason: str) -> None:
        self._on_all(AbandonUpdate(reason))

    def decline(self, source: WeightSource, reason: str) -> None:
        self._on_all(DeclineWeights(source, reason))

    def join_group(self, group: JoinGroup) -> None:
        self._on_all(group)

    def leave_group(self, group_name: str) -> None:
        self._on_all(LeaveGroup(group_name))

    def digest(self, selector: str) -> str:
        return str(self._on_all(DigestWeights(selector)))

    def check(self, action: str, selector: str, skip: Sequence[str]) -> list[Checksums]:
        checksums: list[Checksums] = self._on_all(CheckWeights(action, selector, skip))
        return checksums

    def _on_all(self, message: WeightMessage) -> Any:
        """Make a call on this rank and on those that follow it."""
        with self._worker.ranks.sharing(message, _RAISED_BY_ALL):
            return message.run(self.receiver)

    def _read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        message = ReadWeights(names)
        with self._worker.ranks.telling(message, _RAISED_BY_ALL):
            return message.run(self.receiver)

    def _leave_old_weights(self, options: UpdateOptions) -> None:
        """Drop the KV that the old weights computed. An update of drafts alone drops none."""
        if self._worker.weights.reaches_target:
            self._steps.drop_kv(retract=options.flush_cache, abort=options.abort_all_requests)
        elif options.abort_all_requests:
            self._steps.abort_all()

    def _serve_new_weights(self) -> None:
        self._worker.weights_changed()
        self._steps.accept_lengths.begin(self._worker.weights.version)

    def manifest(
        self, selector: str, model_path: str | os.PathLike[str] | None
    ) -> dict[str, TensorSpec]:
        parts = self._worker.weights.parts
        if model_path is None:
            return dict(parts.manifest(selector))
        source = parts.source(Path(checked_path(model_path, "model_path")), selector)
        return dict(source.manifest() or {})

    def read(self, names: Sequence[str]) -> PackedBucket:
        names = [
            checked_name(name, "names") for name in checked_iterable(names, "names", "tensor names")
        ]
        self._worker.weights.require_whole()
        tensors = self._read(names)
        empty = FlattenedBucket(torch.empty(0, dtype=torch.uint8), BucketLayout(()))
        return PackedBucket.of(next(buckets(tensors.items(), 1 << 62), empty))

    def first_rows(self, name: str, count: int) -> list[Any]:
        checked_name(name, "name")
        count = checked_int(count, "truncate_size", minimum=1)
        self._worker.weights.require_resident()
        if not any(name in part.weight_loaders() for part in self._worker.weights.parts.values()):
            raise InvalidInputError("name", name, "is no tensor of this model")
        rows = self._read([name])[name][:count]
        if rows.numel() > _MAX_VALUES:
            raise InvalidInputError(
                "truncate_size", count, f"must leave at most {_MAX_VALUES} values: ask for fewer"
            )
        return rows.float().tolist()
