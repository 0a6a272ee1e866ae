"""Weights through a group of torch.distributed, from one sender to one or many engines.

The sender broadcasts one tensor after another, or with ``packed`` buffers of several. It hears of a
refusal from the call that announced the update, not through the group: so what it sends is taken
off the wire before the error is raised, which keeps the group usable. Where nothing comes for 10
seconds the group closes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import torch

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.validation import checked_int, checked_list, checked_name
from rollout.weights.bucket import FlattenedBucket
from rollout.weights.bucket_layout import BucketEntry, BucketLayout
from rollout.weights.group import WeightGroup
from rollout.weights.manifest import Manifest, TensorSpec, named_dtype
from rollout.weights.source import WeightSource, WeightTensors

_REFUSAL_SECONDS = 10.0  # at most, of each wait for the sender of an update that has failed


@dataclass(frozen=True, slots=True, eq=False)
class GroupSource(WeightSource):
    """The tensors that a joined group's rank 0 sends meanwhile.

    Args:
        load_format: None: the sender broadcasts each tensor by itself, in this order.
            ``packed``: joined to buffers of a GiB, as vLLM's senders do; ``packed:BYTES``: of so
            many bytes.
    """

    names: Sequence[str]
    dtypes: Sequence[str | torch.dtype]
    shapes: Sequence[Sequence[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None

    def manifest(self) -> Manifest:
        """Raises InvalidInputError, naming the field."""
        return announced_manifest(self.names, self.dtypes, self.shapes)


class DistributedSource(WeightTensors):
    """The weights that a group is about to send. A context manager of the update: leaving it by an
    error takes what is left off the wire. ``timeout``: seconds, of each wait."""

    def __init__(self, group: WeightGroup, source: GroupSource, timeout: float) -> None:
        self._manifest = source.manifest()
        self._is_packed, self._layouts = _layouts(self._manifest, source.load_format)
        self._group = group
        self._timeout = timeout
        self._num_received = 0  # buckets

    def manifest(self) -> Manifest:
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._received(self._timeout):
            yield from bucket.unflatten()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(WeightUpdateError):  # the error on its way says more
                for _ in self._received(min(self._timeout, _REFUSAL_SECONDS)):
                    pass

    def _received(self, seconds: float) -> Iterator[FlattenedBucket]:
        """The buckets that are still to come, in one buffer. May be taken up again."""
        num_bytes = max((layout.num_bytes for layout in self._layouts), default=0)
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)
        while self._num_received < len(self._layouts):
            bucket = FlattenedBucket(flat, self._layouts[self._num_received])
            self._num_received += 1
            if self._is_packed:
                self._group.broadcast(bucket.used, seconds)
            else:
                ((_, tensor),) = bucket.unflatten()
                self._group.broadcast(tensor, seconds)
            yield bucket


def announced_manifest(
    names: Sequence[str], dtypes: Sequence[str | torch.dtype], shapes: Sequence[Sequence[int]]
) -> Manifest:
    """Three lists as a manifest. Raises InvalidInputError, naming the field."""
    checked = [
        checked_name(name, f"names[{i}]") for i, name in enumerate(checked_list(names, "names"))
    ]
    for field, values in (("dtypes", dtypes), ("shapes", shapes)):
        if len(checked_list(values, field)) != len(checked):
            raise InvalidInputError(field, len(values), f"must be {len(checked)}, one a name")
    if len(set(checked)) < len(checked):
        raise InvalidInputError("names", names, "must name each tensor once")
    manifest: dict[str, TensorSpec] = {}
    for index, (name, dtype, shape) in enumerate(zip(checked, dtypes, shapes, strict=True)):
        field = f"shapes[{index}]"
        sizes = [
            checked_int(size, f"{field}[{i}]") for i, size in enumerate(checked_list(shape, field))
        ]
        manifest[name] = TensorSpec(tuple(sizes), named_dtype(dtype, f"dtypes[{index}]"))
    return manifest


def _one_by_one(manifest: Manifest) -> list[BucketLayout]:
    return [
        BucketLayout((BucketEntry(name, spec.dtype, spec.shape, 0, spec.num_bytes),))
        for name, spec in manifest.items()
    ]


def _layouts(manifest: Manifest, load_format: str | None) -> tuple[bool, list[BucketLayout]]:
    """Whether buffers come, and what of the manifest each has."""
    if load_format is None:
        return False, _one_by_one(manifest)
    found = re.fullmatch(r"packed(?::([1-9]\d{0,17}))?", str(load_format), re.ASCII)
    if found is None:
        raise InvalidInputError("load_format", load_format, "must be None, packed or packed:BYTES")
    return True, _packed(manifest, int(found[1] or 2**30))


def _packed(manifest: Manifest, num_bytes: int) -> list[BucketLayout]:
    """vLLM's buffers: the bytes of tensors one after the other, each buffer closed by the first
    tensor that takes it beyond ``num_bytes``."""
    found: list[BucketLayout] = []
    entries: list[BucketEntry] = []
    end = 0
    for name, spec in manifest.items():
        start, end = end, end + spec.num_bytes
        entries.append(BucketEntry(name, spec.dtype, spec.shape, start, end))
        if end > num_bytes:
            found.append(BucketLayout(tuple(entries)))
            entries, end = [], 0
    return found + ([BucketLayout(tuple(entries))] if entries else [])
