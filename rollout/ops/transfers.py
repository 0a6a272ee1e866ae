"""Transfers between host and device: many small arrays as one copy.

A copy costs about as much to start as a kernel, so what a step sends and what it reads back travel
packed, as words of four bytes. On the CPU, where tensors are views of arrays, nothing is packed.

A record is a dictionary of arrays or tensors, or a dataclass whose fields are arrays, tensors,
other such dataclasses, or anything else, which is passed on as it is. Numbers have four or eight
bytes. A transfer gives a record of the same type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import gpu

A = TypeVar("A")
"""The values of a record: arrays on the host, tensors on a device."""

_DTYPES: dict[np.dtype, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
"""The dtypes that can cross to the device, with torch's name for each."""

_NUMPY_DTYPES = {dtype: own for own, dtype in _DTYPES.items()}

_ALIGNMENT = 16
"""The alignment in bytes that torch and Triton want for a tensor's start."""

_INT32 = np.dtype(np.int32)
_LEAVES = (np.ndarray, torch.Tensor)
_PADDINGS = [bytes(count) for count in range(_ALIGNMENT)]

_VIEWS_KEPT = 4096


def upload(record: Any, device: torch.device) -> Any:
    """The record of arrays as one of tensors on the device, by one asynchronous copy.

    The arrays are contiguous, and may be written to again at once; on the CPU the tensors are views
    of them.
    """
    arrays = _leaves(record)
    if not gpu.runs_on(device):
        return _rebuilt(record, map(torch.from_numpy, arrays))
    packed, firsts = _packed(arrays, pinned=device.type == "cuda")
    sent = torch.empty(len(packed), dtype=torch.int32, device=device)
    sent.copy_(packed, non_blocking=True)
    places = zip(arrays, firsts, strict=True)
    views = [_view(sent, first, array.dtype, array.shape) for array, first in places]
    return _rebuilt(record, iter(views))


class DeviceBuffer:
    """Device memory that records are sent to, again and again.

    Arrays go one behind the other, in the record's order: those of the same shapes and dtypes to
    the same places. Earlier values are overwritten, in the order of the device's work.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._words = torch.empty(num_bytes // 4, dtype=torch.int32, device=device)
        self._views: dict[tuple, torch.Tensor] = {}

    def send(self, record: Any) -> Any:
        """Send a record as `upload` does. None, and nothing sent, where it does not fit."""
        arrays = _leaves(record)
        packed, firsts = _packed(arrays, pinned=self._words.is_cuda)
        count = packed.numel()
        if count > self._words.numel():
            return None
        self._view(0, _INT32, (count,)).copy_(packed, non_blocking=True)
        places = zip(arrays, firsts, strict=True)
        views = [self._view(first, array.dtype, array.shape) for array, first in places]
        return _rebuilt(record, iter(views))

    def _view(self, first: int, dtype: np.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the buffer, made once, since torch takes microseconds for each."""
        key = (first, dtype, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            view = self._views[key] = _view(self._words, first, dtype, shape)
        return view


class Download:
    """A record of tensors on its way to the host, by one copy that is begun when this is made."""

    def __init__(self, record: Any) -> None:
        tensors: list[torch.Tensor] = _leaves(record)
        self._copied: torch.cuda.Event | None = None
        (device,) = {tensor.device for tensor in tensors}
        if not gpu.runs_on(device):
            self._record = _rebuilt(record, map(torch.Tensor.numpy, tensors))
            return
        # Tensors of eight bytes come first, so that all are aligned.
        order = sorted(range(len(tensors)), key=lambda k: -tensors[k].element_size())
        packed = torch.cat([tensors[k].reshape(-1).view(torch.int32) for k in order])
        host = _host_words(packed.numel(), pinned=device.type == "cuda")
        host.copy_(packed, non_blocking=True)
        words, first = host.numpy(), 0  # views, made while the device computes
        arrays: dict[int, NDArray] = {}
        for k in order:
            tensor = tensors[k]
            last = first + tensor.numel() * tensor.element_size() // words.itemsize
            array = words[first:last].view(_NUMPY_DTYPES[tensor.dtype])
            arrays[k] = array.reshape(tensor.shape)
            first = last
        self._record = _rebuilt(record, (arrays[k] for k in range(len(tensors))))
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def read(self) -> Any:
        """The record of arrays. Waits for what computes them and for nothing launched later."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._record


def download(record: Any) -> Any:
    """Read a record from the device and wait for it; see `Download`."""
    return Download(record).read()


def _leaves(record: Any) -> list[Any]:
    """The arrays or tensors of a record, in order."""
    if isinstance(record, dict):
        return list(record.values())
    found: list[Any] = []
    for part in vars(record).values():
        if isinstance(part, _LEAVES):
            found.append(part)
        elif part is not None and is_dataclass(part):
            found += _leaves(part)
    return found


def _rebuilt(record: Any, leaves: Iterator[Any]) -> Any:
    """A record like this one of other arrays or tensors, given in order."""
    if isinstance(record, dict):
        return dict(zip(record, leaves, strict=True))
    parts = vars(record).copy()
    for name, part in parts.items():
        if isinstance(part, _LEAVES):
            parts[name] = next(leaves)
        elif part is not None and is_dataclass(part):
            parts[name] = _rebuilt(part, leaves)
    rebuilt = object.__new__(type(record))
    rebuilt.__dict__ = parts
    return rebuilt


def _packed(arrays: list[NDArray], *, pinned: bool) -> tuple[torch.Tensor, list[int]]:
    """The arrays as int32 words on the host, one behind another, and the word each begins at."""
    pieces: list[Any] = []  # arrays and bytes
    firsts: list[int] = []
    total = 0
    for array in arrays:
        size = array.nbytes
        padding = -size % _ALIGNMENT
        pieces += (array, _PADDINGS[padding])
        firsts.append(total // 4)
        total += size + padding
    # The pinned allocator hands memory out again only when copies from it are done.
    packed = _host_words(total // 4, pinned=pinned)
    packed.numpy()[:] = np.frombuffer(b"".join(pieces), dtype=np.int32)
    return packed, firsts


def _view(words: torch.Tensor, first: int, dtype: np.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize // 4
    own = words[first : first + count]
    typed = own if dtype == _INT32 else own.view(_DTYPES[dtype])
    return typed if len(shape) == 1 else typed.view(shape)


def _host_words(count: int, *, pinned: bool) -> torch.Tensor:
    """An uninitialised int32 tensor [count] on the host, whatever torch's default device is."""
    return torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=pinned)
