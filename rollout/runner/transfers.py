"""Between host and device: many small arrays as one copy.

A copy costs about as much to start as a kernel, so what a step sends and what it reads back travel
packed, as words of four bytes. On the CPU, where tensors are views of arrays, nothing is packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import gpu

_DTYPES: dict[np.dtype, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
"""Those that travel."""

_NUMPY_DTYPES = {dtype: own for own, dtype in _DTYPES.items()}

_ALIGNMENT = 16
"""Bytes: what torch and Triton want of the start of any tensor."""

_INT32 = np.dtype(np.int32)
_PADDINGS = [bytes(count) for count in range(_ALIGNMENT)]

_VIEWS_KEPT = 4096


def upload(arrays: Mapping[str, NDArray], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays as tensors on the device, of the same dtypes and shapes, by one asynchronous copy.

    ``arrays``: contiguous; of dtypes of four or eight bytes. They may be written to again at once;
    on the CPU the tensors are views of them.
    """
    if not gpu.runs_on(device):
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    packed, firsts = _packed(arrays, pinned=device.type == "cuda")
    sent = torch.empty(len(packed), dtype=torch.int32, device=device)
    sent.copy_(packed, non_blocking=True)
    return {
        name: _view(sent, first, array.dtype, array.shape)
        for (name, array), first in zip(arrays.items(), firsts, strict=True)
    }


class DeviceBuffer:
    """Memory on a device that is sent to again and again.

    Arrays go one behind the other, in the order given: those of the same shapes and dtypes to the
    same places. What lay there is overwritten, in the order of the device's work.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._words = torch.empty(num_bytes // 4, dtype=torch.int32, device=device)
        self._views: dict[tuple, torch.Tensor] = {}

    def send(self, arrays: Mapping[str, NDArray]) -> dict[str, torch.Tensor] | None:
        """Send arrays as `upload` does. None, and nothing sent, where they do not fit."""
        packed, firsts = _packed(arrays, pinned=self._words.is_cuda)
        count = packed.numel()
        if count > self._words.numel():
            return None
        self._view(0, _INT32, (count,)).copy_(packed, non_blocking=True)
        return {
            name: self._view(first, array.dtype, array.shape)
            for (name, array), first in zip(arrays.items(), firsts, strict=True)
        }

    def _view(self, first: int, dtype: np.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Made once, for torch takes microseconds for each."""
        key = (first, dtype, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            view = self._views[key] = _view(self._words, first, dtype, shape)
        return view


class Download:
    """Tensors on their way to the host, by one copy that is begun when this is made.

    Of dtypes of four or eight bytes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # Those of eight bytes first, so that all lie where they want to.
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        self._arrays: dict[str, NDArray] = {}
        self._copied: torch.cuda.Event | None = None
        devices = {tensor.device for tensor in tensors.values()}
        if not any(gpu.runs_on(device) for device in devices):
            self._arrays = {name: tensor.numpy() for name, tensor in ordered}
            return
        (device,) = devices
        packed = torch.cat([tensor.reshape(-1).view(torch.int32) for _, tensor in ordered])
        host = _host_words(packed.numel(), pinned=device.type == "cuda")
        host.copy_(packed, non_blocking=True)
        words, first = host.numpy(), 0  # views, made while the device computes
        for name, tensor in ordered:
            last = first + tensor.numel() * tensor.element_size() // words.itemsize
            array = words[first:last].view(_NUMPY_DTYPES[tensor.dtype])
            self._arrays[name] = array.reshape(tensor.shape)
            first = last
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def read(self) -> dict[str, NDArray]:
        """The tensors as arrays. Waits for what computes them and for nothing launched later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._arrays


def download(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray]:
    """`Download`, read at once."""
    return Download(tensors).read()


def _packed(arrays: Mapping[str, NDArray], *, pinned: bool) -> tuple[torch.Tensor, list[int]]:
    """All of them as words on the host, and where each begins."""
    pieces: list[Any] = []  # arrays and bytes
    firsts: list[int] = []
    total = 0
    for array in arrays.values():
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
    """On the host also where a script has made another device torch's default."""
    return torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=pinned)
