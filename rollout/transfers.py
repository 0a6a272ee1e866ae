"""Between host and device: many small arrays as one copy.

A copy costs about as much to start as a kernel, so what a step sends and what it reads back travel
packed. On the CPU, where tensors are views of arrays, nothing is packed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import gpu

_ALIGNMENT = 16
"""Bytes: what torch and Triton want of the start of any tensor."""


def packed_bytes(arrays: Mapping[str, NDArray]) -> int:
    """What they take in a buffer of `upload`."""
    return sum(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values())


def upload(
    arrays: Mapping[str, NDArray], device: torch.device, into: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The arrays as tensors on the device, of the same dtypes and shapes, by one asynchronous copy.

    Args:
        arrays: contiguous; of dtypes torch has.
        into: uint8, where on the device they go, one behind the other in the order given; default:
            new memory. Arrays of the same shapes and dtypes go to the same places.

    The arrays may be written to again at once; on the CPU the tensors are views of them.
    """
    if not gpu.runs_on(device) and into is None:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    size = packed_bytes(arrays)
    if into is None:
        into = torch.empty(size, dtype=torch.uint8, device=device)
    assert size <= len(into), f"{size} bytes sent into a buffer of {len(into)}"
    # The pinned allocator hands memory out again only when copies from it are done.
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    tensors: dict[str, torch.Tensor] = {}
    first = 0
    for name, array in arrays.items():
        part = slice(first, first + array.nbytes)
        host[part] = array.reshape(-1).view(np.uint8)
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors[name] = into[part].view(dtype).view(array.shape)
        first += packed_bytes({name: array})
    into[:size].copy_(packed, non_blocking=True)
    return tensors


class Download:
    """Tensors on their way to the host, by one copy that is begun when this is made.

    Of dtypes of four or eight bytes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._host: torch.Tensor | None = None  # None: they are there
        self._copied: torch.cuda.Event | None = None
        devices = {tensor.device for tensor in tensors.values()}
        if not any(gpu.runs_on(device) for device in devices):
            return
        (device,) = devices
        packed = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors.values()])
        self._host = torch.empty(len(packed), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host.copy_(packed, non_blocking=True)
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def read(self) -> dict[str, NDArray]:
        """The tensors as arrays. Waits for what computes them and for nothing launched later."""
        if self._host is None:
            return {name: tensor.numpy() for name, tensor in self._tensors.items()}
        if self._copied is not None:
            self._copied.synchronize()
        words = self._host.numpy()
        arrays: dict[str, NDArray] = {}
        first = 0
        for name, tensor in self._tensors.items():
            last = first + tensor.numel() * tensor.element_size() // words.itemsize
            dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
            # A copy: words need not lie where numbers of eight bytes want to.
            arrays[name] = words[first:last].copy().view(dtype).reshape(tensor.shape)
            first = last
        return arrays


def download(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray]:
    """`Download`, read at once."""
    return Download(tensors).read()
