"""Weights through CUDA IPC, between processes that share a GPU.

As `shared_memory`, but the buffer is on the device and its handle what the CUDA driver calls it.
It has never been run on a GPU: `_exported` and `_mapped`, the two calls of torch it rests on, were
written by reading, the rest is tested with memory of the CPU in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from rollout.errors import EngineStateError, InvalidInputError
from rollout.validation import checked_hex, checked_int, checked_name, checked_object
from rollout.weights.bucket import (
    DEFAULT_BUCKET_BYTES,
    FlattenedBucket,
    buckets,
)
from rollout.weights.bucket_layout import BucketLayout, checked_bucket_bytes
from rollout.weights.segment import (
    HEADER_BYTES,
    NO_BUCKET,
    NONCE_BYTES,
    checked_nonce,
    new_nonce,
    refuse_refilled,
    refuse_replaced,
)
from rollout.weights.source import NamedTensors, closed_iterator

KIND = "cuda_ipc"

_EXPANDABLE = b"e"
"""What torch writes behind a memory handle's version byte for memory of expandable segments. Such
memory is shared by file descriptors, which containers mostly forbid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBuffer:
    """A buffer on a GPU as another process's torch can map it.

    The device goes by its UUID: processes may number their devices differently. What is counted
    and the event are torch's own: when to free, when the buffer is filled.
    """

    device_uuid: str
    memory: bytes
    storage_bytes: int
    storage_offset: int  # bytes into the allocation the memory handle is of
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool

    @property
    def identity(self) -> tuple[str, bytes, int]:
        """Equal for handles of one buffer."""
        return self.device_uuid, self.memory, self.storage_offset


@dataclass(frozen=True, slots=True)
class CudaIpcHandle:
    """A bucket: the buffer it lies in, behind a header, and the nonce in that header."""

    buffer: ExportedBuffer
    nonce: bytes
    layout: BucketLayout

    def to_json(self) -> dict[str, Any]:
        exported = {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in asdict(self.buffer).items()
        }
        handle = {"kind": KIND, "nonce": self.nonce.hex(), "layout": self.layout.to_json()}
        return exported | handle

    @classmethod
    def from_json(cls, value: object, field: str = "handle") -> Self:
        """Raises InvalidInputError, naming the field, for anything `to_json` would not write."""
        keys = ("kind", "nonce", "layout", *ExportedBuffer.__dataclass_fields__)
        fields = checked_object(value, keys, field)
        if fields["kind"] != KIND:
            raise InvalidInputError(f"{field}.kind", fields["kind"], f"must be {KIND}")
        if not isinstance(fields["event_sync"], bool):
            raise InvalidInputError(f"{field}.event_sync", fields["event_sync"], "must be a bool")
        buffer = ExportedBuffer(
            device_uuid=checked_name(fields["device_uuid"], f"{field}.device_uuid"),
            memory=checked_hex(fields["memory"], f"{field}.memory"),
            storage_bytes=checked_int(fields["storage_bytes"], f"{field}.storage_bytes"),
            storage_offset=checked_int(fields["storage_offset"], f"{field}.storage_offset"),
            counter=checked_hex(fields["counter"], f"{field}.counter"),
            counter_offset=checked_int(fields["counter_offset"], f"{field}.counter_offset"),
            event=checked_hex(fields["event"], f"{field}.event"),
            event_sync=fields["event_sync"],
        )
        nonce = checked_nonce(fields["nonce"], f"{field}.nonce")
        layout = BucketLayout.from_json(fields["layout"], f"{field}.layout")
        if buffer.storage_bytes < HEADER_BYTES + layout.num_bytes:
            raise InvalidInputError(
                f"{field}.storage_bytes", buffer.storage_bytes,
                f"must hold a header and the layout's {layout.num_bytes} bytes",
            )  # fmt: skip
        return cls(buffer, nonce, layout)


class CudaIpcSender:
    """Packs weights that are on a GPU into one buffer there, used again for every bucket.

    Every tensor is copied into it: no receiver ever maps the trainer's own memory. A tensor larger
    than ``bucket_bytes`` makes it grow. It is kept for the next update. A context manager; `close`
    frees it.

    ``device``: of the buffer; default: that of the first tensor.
    """

    num_buffers = 1

    def __init__(
        self, bucket_bytes: int = DEFAULT_BUCKET_BYTES, device: torch.device | None = None
    ) -> None:
        self.bucket_bytes = checked_bucket_bytes(bucket_bytes)
        self.device = device
        self._buffer: torch.Tensor | None = None  # uint8 [header and a bucket]
        # Once a buffer: each export is one more wrapper around its storage, for torch to unwind.
        self._exported: ExportedBuffer | None = None
        self._closed = False

    def handles(self, named_tensors: NamedTensors) -> Iterator[dict[str, Any]]:
        """One handle a bucket, for one receiver, valid until the next is asked for.

        Raises InvalidInputError for tensors that are not on a GPU, EngineStateError after `close`.
        """
        stream = buckets(
            named_tensors, self.bucket_bytes, device=self.device, buffer=self._next_flat
        )
        with closed_iterator(stream) as packed:
            for bucket in packed:
                self._require_open()
                buffer = self._buffer
                assert buffer is not None
                if self._exported is None:
                    self._exported = _exported(buffer)
                    if self._exported.memory[1:2] == _EXPANDABLE:
                        raise InvalidInputError(
                            "expandable_segments", True, "must be off where weights go by CUDA IPC"
                        )
                nonce = new_nonce()
                _stamp(buffer, nonce)
                _finish(buffer.device)
                yield CudaIpcHandle(self._exported, nonce, bucket.layout).to_json()

    def close(self) -> None:
        """Free the buffer, for good."""
        self._buffer, self._exported, self._closed = None, None, True

    def _next_flat(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self._require_open()
        buffer, needed = self._buffer, HEADER_BYTES + num_bytes
        if buffer is None or buffer.device != device or buffer.numel() < needed:
            buffer = torch.empty(needed, dtype=torch.uint8, device=device)
            self._buffer, self._exported = buffer, None
        _stamp(buffer, NO_BUCKET)
        return buffer[HEADER_BYTES:]

    def _require_open(self) -> None:
        if self._closed:
            raise EngineStateError("the sender is closed: make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CudaIpcReceiver:
    """Maps the buffers that handles name, each once until `release`."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[str, bytes, int], torch.Tensor] = {}

    def check(self, handles: Mapping[str, CudaIpcHandle]) -> None:
        """Raises InvalidInputError, naming the field, unless every handle's bucket is there now."""
        first: dict[tuple[str, bytes, int], str] = {}
        for field, handle in handles.items():
            identity = handle.buffer.identity
            if identity in first:
                raise InvalidInputError(
                    field, handle.buffer.memory.hex(),
                    f"is of the same buffer as {first[identity]}, which holds the last bucket of "
                    "all: hand over the iterator itself",
                )  # fmt: skip
            first[identity] = field
        for field, handle in handles.items():
            self._current(handle, field)

    def tensors(self, handle: CudaIpcHandle, field: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and views of the sender's buffer, whose reads are complete when this ends.

        Raises InvalidInputError where the bucket is not there, WeightUpdateError if the sender
        refilled the buffer meanwhile.
        """
        buffer = self._current(handle, field)
        yield from FlattenedBucket(buffer[HEADER_BYTES:], handle.layout).unflatten()
        _finish(buffer.device)
        refuse_refilled(handle.nonce, _nonce(buffer), "its buffer")

    def release(self) -> None:
        """Let go of every buffer."""
        self._mapped.clear()

    def _current(self, handle: CudaIpcHandle, field: str) -> torch.Tensor:
        identity = handle.buffer.identity
        if identity not in self._mapped:
            self._mapped[identity] = _mapped(handle.buffer, field)
        buffer = self._mapped[identity]
        if buffer.numel() < HEADER_BYTES + handle.layout.num_bytes:
            raise InvalidInputError(
                f"{field}.layout.num_bytes", handle.layout.num_bytes,
                f"is more than the buffer's {buffer.numel()} bytes",
            )  # fmt: skip
        refuse_replaced(handle.nonce, _nonce(buffer), field)
        return buffer


def _stamp(buffer: torch.Tensor, nonce: bytes) -> None:
    with torch.inference_mode():
        buffer[:NONCE_BYTES].copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))


def _nonce(buffer: torch.Tensor) -> bytes:
    return bytes(buffer[:NONCE_BYTES].tolist())


def _finish(device: torch.device) -> None:
    """Wait for what this process has asked of the device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _exported(buffer: torch.Tensor) -> ExportedBuffer:
    if not buffer.is_cuda:
        raise InvalidInputError("named_tensors", buffer.device, "must be on a GPU")
    _, memory, storage_bytes, storage_offset, counter, counter_offset, event, event_sync = (
        buffer.untyped_storage()._share_cuda_()
    )
    return ExportedBuffer(
        device_uuid=str(torch.cuda.get_device_properties(buffer.device).uuid),
        memory=memory,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        event_sync=event_sync,
    )


def _mapped(exported: ExportedBuffer, field: str) -> torch.Tensor:
    """Another process's buffer, uint8 [storage_bytes]."""
    device = _device(exported.device_uuid, f"{field}.device_uuid")
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index, exported.memory, exported.storage_bytes, exported.storage_offset,
        exported.counter, exported.counter_offset, exported.event, exported.event_sync,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _device(uuid: str, field: str) -> torch.device:
    visible = _visible_uuids()
    if uuid not in visible:
        raise InvalidInputError(field, uuid, f"must be a GPU of this process: {visible}")
    return torch.device("cuda", visible.index(uuid))


def _visible_uuids() -> list[str]:
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
