"""Weights through a group of torch.distributed, from one sender to one or many engines.

An update of `DistributedSender`, with the notes it leaves in the group's store::

    sender, rank 0                         receivers
    announcement (digest)  ------------->  begin: names, shapes, dtypes checked
              <---------------------- answer/<rank>: what it needs of each tensor, or refused
    go, or withdrawn           --------->
    bucket, bucket, ...        =========>  load
              <---------------------- result/<rank>: loaded, or the error
    announcement: over

Each note carries the number of its update, so those of another are told apart. Nothing is sent
unless every receiver takes it, and the sender knows who has loaded it. A receiver that fails in the
middle takes the rest off the wire before it says so: the group stays usable. Where the connection
itself fails the group closes, which ends everybody's waiting.

Buckets are broadcast whole where every receiver needs all of every tensor. Where one needs less,
each bucket is sent to each receiver by itself, with what that one needs of the bucket's tensors.

Callers that broadcast by themselves and without notes are received with ``load_format=None``, one
tensor after another, or with ``packed``, joined to buffers. They cannot be told of a refusal, so
what they send is taken off the wire before it is raised, which keeps the group usable; where
nothing comes for 10 seconds it closes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.validation import checked_int, checked_list, checked_name
from rollout.weights.bucket import FlattenedBucket
from rollout.weights.bucket_layout import BucketEntry, BucketLayout, layouts, sliced_layout
from rollout.weights.group import BroadcastGroup, WeightGroup
from rollout.weights.manifest import (
    Manifest,
    Slices,
    TensorSpec,
    named_dtype,
    slices_to_json,
)
from rollout.weights.source import WeightSource, WeightTensors

_REFUSAL_SECONDS = 10.0  # at most, of each wait for the sender of an update that has failed


@dataclass(frozen=True, slots=True, eq=False)
class GroupSource(WeightSource):
    """The tensors that a joined group's rank 0 sends meanwhile.

    Args:
        load_format: None: the sender broadcasts each tensor by itself, in this order.
            ``packed``: joined to buffers of a GiB, as vLLM's senders do; ``packed:BYTES``: of so
            many bytes. ``flattened_bucket``: it is a `DistributedSender`, whose ``arguments``
            these are.
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
    """The weights a group is about to send, as a WeightSource and a context manager of the update.

    Leaving it takes what is left off the wire and tells the sender how the update went.

    Args:
        load_format: ``flattened_bucket`` from a `DistributedSender`; None from a caller that
            broadcasts each tensor by itself, in the order of the manifest; ``packed`` or
            ``packed:BYTES`` from one that joins them as vLLM's senders do (`_packed`).
        timeout: seconds, of each wait.
    """

    def __init__(self, group: BroadcastGroup, *, load_format: str | None, timeout: float) -> None:
        self._packed_bytes = _packed_bytes(load_format)
        if self._packed_bytes is None and load_format not in (None, "flattened_bucket"):
            raise InvalidInputError(
                "load_format", load_format,
                "must be None, packed, packed:BYTES or flattened_bucket",
            )  # fmt: skip
        if load_format == "flattened_bucket" and not isinstance(group, WeightGroup):
            raise InvalidInputError(
                "load_format", load_format,
                "is what a DistributedSender sends: this group's sender broadcasts each tensor by "
                "itself, load_format=None",
            )  # fmt: skip
        self._group = group
        self._manifest: Manifest = {}
        self._timeout = timeout
        self._has_notes = load_format == "flattened_bucket"
        self._number = 0  # of the update; 0 until its announcement is read
        self._is_silent = False  # whether the sender was waited for, and announced nothing
        self._under_way = not self._has_notes  # whether buckets come
        self._layouts: list[BucketLayout] = []
        self._num_received = 0  # buckets
        self._needed: Slices = {}
        self._is_sliced = False  # whether each receiver is sent what it needs

    def expect(self, manifest: Manifest) -> None:
        """Say what is going to come. Inside the context, so that the sender hears of a failure."""
        self._manifest = manifest
        if self._packed_bytes is not None:
            self._layouts = _packed(manifest, self._packed_bytes)
        elif not self._has_notes:
            self._layouts = _one_by_one(manifest)

    def manifest(self) -> Manifest:
        """The manifest that `expect` was given."""
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._has_notes:
            self._agree()
        for bucket in self._received(self._timeout):
            yield from bucket.unflatten()

    def sliced(self, needed: Slices) -> Iterator[tuple[str, torch.Tensor]]:
        """The needed slices of the tensors: sent alone, or cut out of broadcast ones."""
        self._needed = needed
        for name, tensor in self:
            where = None if self._is_sliced else needed.get(name)
            yield name, tensor if where is None else where.of(tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._tell("result", None)
            return
        if self._is_silent:
            return
        seconds = min(self._timeout, _REFUSAL_SECONDS)
        try:
            if self._has_notes and not self._number:
                self._read_announcement(seconds)
            for _ in self._received(seconds):
                pass
            self._tell("result" if self._under_way else "answer", error)
        except WeightUpdateError:
            # Nobody can be told: the sender never came, or the connection is what failed. The
            # error on its way says more than this one.
            return

    def _agree(self) -> None:
        """Answer the announcement, and wait until everybody has."""
        announced = self._read_announcement(self._timeout)
        if announced["manifest"] != manifest_digest(self._manifest):
            raise InvalidInputError(
                "names", f"{len(self._manifest)} names",
                "with their dtypes and shapes must be what the sender sends, in its order: "
                "DistributedSender.arguments gives them",
            )  # fmt: skip
        self._layouts = layouts(self._manifest, announced["bucket_bytes"])
        self._tell("answer", None, needed=slices_to_json(self._needed))
        go = self._group.notes.collect(["go"], self._timeout, self._is_of_this)
        if not go:
            raise WeightUpdateError(f"the sender was silent for {self._timeout:g} seconds")
        (note,) = go.values()
        if note["error"]:
            raise WeightUpdateError(f"the sender gave the update up: {note['error']}")
        self._is_sliced = note["sliced"]
        if self._is_sliced:
            self._layouts = [sliced_layout(layout, self._needed) for layout in self._layouts]
        self._under_way = True

    def _read_announcement(self, seconds: float) -> dict[str, Any]:
        last = self._group.last_update
        found = self._group.notes.collect(
            ["announcement"], seconds, lambda note: note["number"] > last and not note["over"]
        )
        if not found:
            self._is_silent = True
            raise WeightUpdateError(
                f"group {self._group.name!r}: the sender announced nothing in {seconds:g} seconds; "
                "DistributedSender.send must run meanwhile (load_format=None: bare broadcasts)"
            )
        (note,) = found.values()
        self._number = self._group.last_update = note["number"]
        return note

    def _received(self, seconds: float) -> Iterator[FlattenedBucket]:
        """The buckets that are still to come, in one buffer. May be taken up again."""
        if not self._under_way:
            return
        num_bytes = max((layout.num_bytes for layout in self._layouts), default=0)
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)
        while self._num_received < len(self._layouts):
            bucket = FlattenedBucket(flat, self._layouts[self._num_received])
            self._num_received += 1
            try:
                self._receive(bucket, seconds)
            except WeightUpdateError as error:
                withdrawn = self._group.notes.get("withdrawn")
                if withdrawn is None or not self._is_of_this(withdrawn):
                    raise
                raise WeightUpdateError(
                    f"the sender gave the update up: {withdrawn['error']}"
                ) from error
            yield bucket

    def _receive(self, bucket: FlattenedBucket, seconds: float) -> None:
        """Fill the bucket: its bytes at once, or its one tensor as its owner broadcasts it."""
        if self._is_sliced:
            self._group.receive(bucket.used, seconds)
        elif self._has_notes or self._packed_bytes is not None:
            self._group.broadcast(bucket.used, seconds)
        else:
            ((_, tensor),) = bucket.unflatten()
            self._group.broadcast(tensor, seconds)

    def _tell(self, kind: str, error: BaseException | None, **fields: Any) -> None:
        if self._has_notes:
            note = outcome(self._number, error) | fields
            self._group.notes.put(f"{kind}/{self._group.rank}", note)

    def _is_of_this(self, note: dict[str, Any]) -> bool:
        return bool(note["number"] == self._number)


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


def manifest_digest(manifest: Manifest) -> str:
    """The digest of names, dtypes and shapes in their order, in hexadecimal."""
    lines = [[name, str(spec.dtype), list(spec.shape)] for name, spec in manifest.items()]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def outcome(number: int, error: BaseException | None) -> dict[str, Any]:
    """The note that tells the group whether a stage of an update succeeded."""
    return {
        "number": number,
        "error": None if error is None else str(error) or type(error).__name__,
    }


def _one_by_one(manifest: Manifest) -> list[BucketLayout]:
    return [
        BucketLayout((BucketEntry(name, spec.dtype, spec.shape, 0, spec.num_bytes),))
        for name, spec in manifest.items()
    ]


def _packed_bytes(load_format: str | None) -> int | None:
    """The size that ``packed`` (a GiB, vLLM's default) or ``packed:BYTES`` names; None: neither."""
    found = re.fullmatch(r"packed(?::([1-9]\d{0,17}))?", str(load_format), re.ASCII)
    return None if found is None else int(found[1] or 2**30)


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
