"""Weights through shared memory, between processes of one host, and the receiver of all handles.

The sender packs buckets into a few segments it owns and hands out handles, which are plain JSON and
travel however the caller likes. The receiver maps a segment and loads from views of it. A segment
is stamped with a nonce when a bucket is in it, and each handle names the nonce it is for: a handle
of a bucket that has been replaced is refused, before and after its tensors are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch

from rollout.errors import EngineStateError, InvalidInputError
from rollout.validation import checked_int, checked_iterable, checked_name, checked_object
from rollout.weights import cuda_ipc
from rollout.weights.bucket import (
    CACHED_BUCKET_BYTES,
    FlattenedBucket,
    buckets,
)
from rollout.weights.bucket_layout import (
    BucketLayout,
    checked_bucket_bytes,
    manifest_of_layouts,
)
from rollout.weights.cuda_ipc import CudaIpcHandle, CudaIpcReceiver
from rollout.weights.manifest import Manifest
from rollout.weights.segment import (
    MappedSegment,
    OwnedSegment,
    checked_nonce,
    new_nonce,
    refuse_refilled,
    refuse_replaced,
    remove_orphans,
)
from rollout.weights.source import (
    NamedTensors,
    WeightSource,
    WeightTensors,
    closed_iterator,
)

KIND = "shared_memory"


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """The address of a bucket in shared memory: the segment's name, the nonce it is stamped with
    and the layout of its tensors."""

    segment: str
    nonce: bytes
    layout: BucketLayout

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "segment": self.segment,
            "nonce": self.nonce.hex(),
            "layout": self.layout.to_json(),
        }

    @classmethod
    def from_json(cls, value: object, field: str = "handle") -> Self:
        """Raises InvalidInputError, naming the field, for anything `to_json` would not write."""
        fields = checked_object(value, ("kind", "segment", "nonce", "layout"), field)
        if fields["kind"] != KIND:
            raise InvalidInputError(f"{field}.kind", fields["kind"], f"must be {KIND}")
        return cls(
            checked_name(fields["segment"], f"{field}.segment"),
            checked_nonce(fields["nonce"], f"{field}.nonce"),
            BucketLayout.from_json(fields["layout"], f"{field}.layout"),
        )


class SharedMemorySender:
    """Packs weights into segments, used again for every bucket and every update.

    Args:
        bucket_bytes: of all segments together. A tensor larger than its segment makes that one
            grow, so the most they hold is this, or the largest tensors one a segment.
        num_segments: with two, one can be filled while the other is read.

    Making one removes the segments of senders that have died. A context manager; `close` removes
    its own.
    """

    def __init__(self, bucket_bytes: int = CACHED_BUCKET_BYTES, *, num_segments: int = 2) -> None:
        count = checked_int(num_segments, "num_segments", minimum=1, maximum=64)
        self.num_buffers = count
        self.bucket_bytes = checked_bucket_bytes(checked_bucket_bytes(bucket_bytes) // count)
        self._segments: list[OwnedSegment | None] = [None] * count
        self._filled = -1  # index of the segment filled last
        self._closed = False
        remove_orphans()

    def handles(self, named_tensors: NamedTensors) -> Iterator[dict[str, Any]]:
        """One handle a bucket, each valid until ``num_segments`` more have been asked for.

        Ask for it only when every receiver has loaded the one whose place it takes. Raises
        WeightUpdateError where shared memory is full, EngineStateError after `close`.
        """
        stream = buckets(named_tensors, self.bucket_bytes, buffer=self.next_flat)
        with closed_iterator(stream) as packed:
            for bucket in packed:
                yield self.handle(bucket.layout)

    def handle(self, layout: BucketLayout) -> dict[str, Any]:
        """The handle of the bucket that has been packed into the last `next_flat`."""
        self._require_open()
        segment = self._segments[self._filled]
        assert segment is not None
        nonce = new_nonce()
        segment.stamp(nonce)
        return SharedMemoryHandle(segment.name, nonce, layout).to_json()

    def next_flat(self, num_bytes: int, _device: torch.device) -> torch.Tensor:
        """The next segment, to pack a bucket into. Raises what `handles` does."""
        self._require_open()
        self._filled = (self._filled + 1) % len(self._segments)
        segment = self._segments[self._filled]
        if segment is None or segment.flat.numel() < num_bytes:
            if segment is not None:
                segment.close()
            segment = self._segments[self._filled] = OwnedSegment(num_bytes)
        segment.invalidate()
        return segment.flat

    def _require_open(self) -> None:
        if self._closed:
            raise EngineStateError("the sender is closed: make another one")

    def close(self) -> None:
        self._closed = True
        for segment in self._segments:
            if segment is not None:
                segment.close()
        self._segments = [None] * len(self._segments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SharedMemoryReceiver:
    """Maps the segments that handles name, and keeps them mapped while their owner keeps them."""

    def __init__(self) -> None:
        self._mapped: dict[str, MappedSegment] = {}

    def check(self, handle: SharedMemoryHandle, field: str) -> None:
        """Raises InvalidInputError unless the handle's bucket is there now."""
        self._current(handle, field)

    def tensors(self, handle: SharedMemoryHandle, field: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and views of the segment; raises WeightUpdateError if it was refilled meanwhile."""
        segment = self._current(handle, field)
        yield from FlattenedBucket(segment.flat, handle.layout).unflatten()
        refuse_refilled(handle.nonce, segment.nonce, f"segment {handle.segment}")

    def release(self) -> None:
        """Let go of every segment. Those of senders that have died are removed: the next sender
        would, but there may be none."""
        for segment in self._mapped.values():
            segment.remove_if_orphan()
        self._mapped.clear()

    def release_removed(self) -> None:
        """Let go of the segments that their owners have removed."""
        self._mapped = {
            name: segment for name, segment in self._mapped.items() if not segment.is_removed
        }

    def _current(self, handle: SharedMemoryHandle, field: str) -> MappedSegment:
        name, num_bytes = handle.segment, handle.layout.num_bytes
        if name not in self._mapped:
            self.release_removed()
            self._mapped[name] = MappedSegment(name, num_bytes, f"{field}.segment")
        segment = self._mapped[name]
        if segment.flat.numel() < num_bytes:
            raise InvalidInputError(
                f"{field}.layout.num_bytes", num_bytes,
                f"is more than the {segment.flat.numel()} bytes of segment {name}",
            )  # fmt: skip
        refuse_replaced(handle.nonce, segment.nonce, field)
        return segment


Handle = SharedMemoryHandle | CudaIpcHandle


@dataclass(frozen=True, slots=True, eq=False)
class HandleSource(WeightSource):
    """Buckets that another process of this host holds, of `SharedMemorySender` or `CudaIpcSender`.

    ``handles``: one or several, all valid now, or an iterator that asks the sender for the next
    when the last is loaded.
    """

    handles: Mapping[str, Any] | Iterable[Mapping[str, Any]]

    def __post_init__(self) -> None:
        if isinstance(self.handles, str | bytes) or not isinstance(self.handles, Iterable):
            kind = type(self.handles).__name__
            raise InvalidInputError("handles", kind, "must be one handle or several")

    def split(self) -> Iterator[HandleSource]:
        if isinstance(self.handles, Mapping | Collection):
            yield self
            return
        with closed_iterator(self.handles) as stream:
            yield from map(HandleSource, stream)

    def require_list(self) -> None:
        """Raises InvalidInputError for an iterator."""
        if not isinstance(self.handles, Mapping | Collection):
            kind = type(self.handles).__name__
            raise InvalidInputError("handles", kind, "must be a list: other ranks read them too")


class HandleReceiver:
    """The receiving end of `SharedMemorySender` and `CudaIpcSender`."""

    def __init__(self) -> None:
        self._segments = SharedMemoryReceiver()
        self._buffers = CudaIpcReceiver()

    @contextmanager
    def opened(self, source: HandleSource) -> Iterator[WeightTensors]:
        """The tensors of a source, while its sender's memory is held."""
        try:
            yield self.tensors(source.handles)
        finally:
            self._segments.release_removed()

    def tensors(self, handles: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> WeightTensors:
        """The tensors that handles stand for.

        Handles that are all there are checked now, of an iterator each when the one before has been
        loaded. Raises InvalidInputError, naming the field, for those that are malformed or no
        longer valid.
        """
        self._segments.release_removed()
        given = [handles] if isinstance(handles, Mapping) else handles
        parsed = _parsed(checked_iterable(given, "handles", "handles"))
        if not isinstance(given, Collection):
            return _HandleTensors(self, parsed, is_stored=False)
        stored = list(parsed)
        for field, handle in stored:
            if isinstance(handle, SharedMemoryHandle):
                self._segments.check(handle, field)
        self._buffers.check(
            {field: handle for field, handle in stored if isinstance(handle, CudaIpcHandle)}
        )
        return _HandleTensors(self, stored, is_stored=True)

    def tensors_of(self, handle: Handle, field: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and tensors of one handle's bucket."""
        if isinstance(handle, SharedMemoryHandle):
            return self._segments.tensors(handle, field)
        return self._buffers.tensors(handle, field)

    def release_devices(self) -> None:
        """Let go of senders' memory on GPUs, which they may want back after an update."""
        self._buffers.release()

    def release(self) -> None:
        """Let go of every sender's memory. The next handle maps it again."""
        self._segments.release()
        self._buffers.release()


class _HandleTensors(WeightTensors):
    """The tensors of handles by their fields."""

    def __init__(
        self, receiver: HandleReceiver, handles: Iterable[tuple[str, Handle]], *, is_stored: bool
    ) -> None:
        self._receiver = receiver
        self._handles = handles
        self.is_stored = is_stored

    def manifest(self) -> Manifest | None:
        if not self.is_stored:
            return None
        return manifest_of_layouts(handle.layout for _, handle in self._handles)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with closed_iterator(self._handles) as handles:
            for field, handle in handles:
                yield from self._receiver.tensors_of(handle, field)


def _parsed(handles: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Handle]]:
    with closed_iterator(handles) as stream:
        for index, handle in enumerate(stream):
            field = f"handles[{index}]"
            yield field, _handle(handle, field)


def _handle(value: Mapping[str, Any], field: str) -> Handle:
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if kind == KIND:
        return SharedMemoryHandle.from_json(value, field)
    if kind == cuda_ipc.KIND:
        return CudaIpcHandle.from_json(value, field)
    raise InvalidInputError(f"{field}.kind", kind, f"must be {KIND} or {cuda_ipc.KIND}")
