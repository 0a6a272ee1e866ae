"""Handles of buckets that another process of this host holds, as a stream of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from rollout.checked import checked_iterable
from rollout.errors import InvalidInputError
from rollout.weights import cuda_ipc, shared_memory
from rollout.weights.bucket_layout import manifest_of_layouts
from rollout.weights.cuda_ipc import CudaIpcHandle, cuda_tensors
from rollout.weights.manifest import Manifest, NamedTensors, StoredWeights, closed_iterator
from rollout.weights.shared_memory import SharedMemoryHandle, SharedMemoryReceiver

Handle = SharedMemoryHandle | CudaIpcHandle


class HandleReceiver:
    """The engine's end of `SharedMemorySender` and `CudaIpcSender`."""

    def __init__(self) -> None:
        self._segments = SharedMemoryReceiver()

    def tensors(self, handles: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> NamedTensors:
        """The names and tensors that the handles stand for.

        A handle or a collection of them is a WeightSource, of which everything is checked now. Of
        a generator each handle is taken when the one before has been loaded. Raises
        InvalidInputError, naming the field, for handles that are malformed or no longer valid.
        """
        self._segments.release_removed()
        if isinstance(handles, Mapping):
            handles = [handles]
        checked_iterable(handles, "handles", "handles")
        if not isinstance(handles, Collection):
            return self._streamed(handles)
        parsed = {
            f"handles[{index}]": _handle(handle, f"handles[{index}]")
            for index, handle in enumerate(handles)
        }
        for field, handle in parsed.items():
            if isinstance(handle, SharedMemoryHandle):
                self._segments.check(handle, field)
        cuda_ipc.check_handles(
            {field: it for field, it in parsed.items() if isinstance(it, CudaIpcHandle)}
        )
        return _HandleSource(parsed, self)

    def tensors_of(self, handle: Handle, field: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and tensors of one handle's bucket."""
        if isinstance(handle, SharedMemoryHandle):
            return self._segments.tensors(handle, field)
        return cuda_tensors(handle, field)

    def release_removed(self) -> None:
        """Let go of the memory of senders that have removed it."""
        self._segments.release_removed()

    def release(self) -> None:
        """Let go of every sender's memory. The next handle maps it again."""
        self._segments.release()

    def _streamed(self, handles: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        with closed_iterator(handles) as stream:
            for index, handle in enumerate(stream):
                field = f"handles[{index}]"
                yield from self.tensors_of(_handle(handle, field), field)


class _HandleSource(StoredWeights):
    """A weight source of handles that are all valid at once."""

    def __init__(self, handles: Mapping[str, Handle], receiver: HandleReceiver) -> None:
        self._handles = handles
        self._receiver = receiver

    def manifest(self) -> Manifest:
        return manifest_of_layouts([handle.layout for handle in self._handles.values()])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for field, handle in self._handles.items():
            yield from self._receiver.tensors_of(handle, field)


def _handle(value: Mapping[str, Any], field: str) -> Handle:
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if kind == shared_memory.KIND:
        return SharedMemoryHandle.from_json(value, field)
    if kind == cuda_ipc.KIND:
        return CudaIpcHandle.from_json(value, field)
    raise InvalidInputError(
        f"{field}.kind", kind, f"must be {shared_memory.KIND} or {cuda_ipc.KIND}"
    )
