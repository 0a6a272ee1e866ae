"""Weights through CUDA IPC, between processes that share a GPU.

As `shared_memory`, but a bucket is a buffer on the device and its handle what the CUDA driver calls
it. Tests of it need a GPU and are skipped without one; it has not been run on the machines this was
written on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from rollout.errors import InvalidInputError
from rollout.weights.bucket import (
    DEFAULT_BUCKET_BYTES,
    FlattenedBucket,
    buckets,
)
from rollout.weights.bucket_layout import BucketLayout, checked_bucket_bytes
from rollout.weights.checked_json import checked_hex, checked_int, checked_name, checked_object
from rollout.weights.manifest import NamedTensors

KIND = "cuda_ipc"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaIpcHandle:
    """A bucket on a GPU, and what the receiver's torch needs to map it.

    The device goes by its UUID: processes may number their devices differently. What is
    counted and the event are torch's own: when to free, when the bucket is complete.
    """

    device_uuid: str
    memory: bytes
    storage_bytes: int
    storage_offset: int  # bytes into the allocation the memory handle is of
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool
    layout: BucketLayout

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "device_uuid": self.device_uuid,
            "memory": self.memory.hex(),
            "storage_bytes": self.storage_bytes,
            "storage_offset": self.storage_offset,
            "counter": self.counter.hex(),
            "counter_offset": self.counter_offset,
            "event": self.event.hex(),
            "event_sync": self.event_sync,
            "layout": self.layout.to_json(),
        }

    @classmethod
    def from_json(cls, value: object, field: str = "handle") -> Self:
        """Raises InvalidInputError, naming the field, for anything `to_json` would not write."""
        fields = checked_object(value, ("kind", *cls.__dataclass_fields__), field)
        if fields["kind"] != KIND:
            raise InvalidInputError(f"{field}.kind", fields["kind"], f"must be {KIND}")
        if not isinstance(fields["event_sync"], bool):
            raise InvalidInputError(f"{field}.event_sync", fields["event_sync"], "must be a bool")
        handle = cls(
            device_uuid=checked_name(fields["device_uuid"], f"{field}.device_uuid"),
            memory=checked_hex(fields["memory"], f"{field}.memory"),
            storage_bytes=checked_int(fields["storage_bytes"], f"{field}.storage_bytes"),
            storage_offset=checked_int(fields["storage_offset"], f"{field}.storage_offset"),
            counter=checked_hex(fields["counter"], f"{field}.counter"),
            counter_offset=checked_int(fields["counter_offset"], f"{field}.counter_offset"),
            event=checked_hex(fields["event"], f"{field}.event"),
            event_sync=fields["event_sync"],
            layout=BucketLayout.from_json(fields["layout"], f"{field}.layout"),
        )
        if handle.storage_bytes < handle.layout.num_bytes:
            raise InvalidInputError(
                f"{field}.storage_bytes", handle.storage_bytes,
                f"must hold the layout's {handle.layout.num_bytes} bytes",
            )  # fmt: skip
        return handle


class CudaIpcSender:
    """Packs weights that are on a GPU into one buffer there, used again for every bucket."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self._bucket_bytes = checked_bucket_bytes(bucket_bytes)

    def handles(self, named_tensors: NamedTensors) -> Iterator[dict[str, Any]]:
        """One handle a bucket, for one receiver, valid until the next is asked for."""
        for bucket in buckets(named_tensors, self._bucket_bytes):
            if not bucket.flat.is_cuda:
                raise InvalidInputError("named_tensors", bucket.flat.device, "must be on a GPU")
            yield _handle(bucket).to_json()


def cuda_tensors(handle: CudaIpcHandle, field: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and views of the sender's buffer, whose reads are complete when this ends."""
    device = _device(handle.device_uuid, f"{field}.device_uuid")
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index, handle.memory, handle.storage_bytes, handle.storage_offset,
        handle.counter, handle.counter_offset, handle.event, handle.event_sync,
    )  # fmt: skip
    flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    yield from FlattenedBucket(flat, handle.layout).unflatten()
    torch.cuda.current_stream(device).synchronize()


def _handle(bucket: FlattenedBucket) -> CudaIpcHandle:
    flat = bucket.flat
    torch.cuda.current_stream(flat.device).synchronize()
    _, memory, storage_bytes, storage_offset, counter, counter_offset, event, event_sync = (
        flat.untyped_storage()._share_cuda_()
    )
    return CudaIpcHandle(
        device_uuid=str(torch.cuda.get_device_properties(flat.device).uuid),
        memory=memory,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        event_sync=event_sync,
        layout=bucket.layout,
    )


def _device(uuid: str, field: str) -> torch.device:
    present = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    if uuid not in present:
        raise InvalidInputError(field, uuid, f"must be a GPU of this process: {present}")
    return torch.device("cuda", present.index(uuid))
