"""What numpy and torch call by different names, for code that runs on the arrays of both.

On the CPU arrays are numpy's, whose calls take a microsecond where torch's take several; on a
device they are torch's. Operators, indexing by arrays, ``reshape``, ``sum``, ``cumsum``, ``clip``,
and of `Arrays.alike` ``concatenate``, ``where``, ``minimum``, ``maximum``, ``amax`` and
``searchsorted`` are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.runner.transfers import download

Array = Any
"""A numpy array on the host, or a tensor on a device."""


class Arrays:
    """numpy's arrays; the base of torch's."""

    on_host = True
    """Whether looking at an element costs nothing. Else nothing waits for the device but `read`."""

    alike: ModuleType = np
    """The module whose functions are called."""

    def of_tensor(self, tensor: torch.Tensor) -> Array:
        """The tensor, which is where these arrays are, as one of them; nothing is copied."""
        return tensor.numpy()

    def read(self, arrays: Mapping[str, Array]) -> dict[str, NDArray]:
        """The arrays on the host."""
        return dict(arrays)

    def arange(self, count: int) -> Array:
        """int64 [count]: 0, 1, ..."""
        return np.arange(count)

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        """int64 of this shape, all the value."""
        return np.full(shape, value)

    def descending(self, array: Array) -> Array:
        """The columns of each row, the highest value first, of equals the first column."""
        return np.argsort(-array, axis=1, kind="stable")

    def int32(self, array: Array) -> Array:
        """The array as int32."""
        return array.astype(np.int32)

    def float32(self, array: Array) -> Array:
        """The array as float32."""
        return array.astype(np.float32)

    def float64(self, array: Array) -> Array:
        """The array as float64."""
        return array.astype(np.float64)


class DeviceArrays(Arrays):
    """Tensors on a device."""

    on_host = False
    alike = torch

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def of_tensor(self, tensor: torch.Tensor) -> Array:
        return tensor

    def read(self, arrays: Mapping[str, Array]) -> dict[str, NDArray]:
        return download(arrays)

    def arange(self, count: int) -> Array:
        return torch.arange(count, device=self._device)

    def full(self, shape: tuple[int, ...], value: int) -> Array:
        return torch.full(shape, value, device=self._device)

    def descending(self, array: Array) -> Array:
        return torch.argsort(array, dim=1, descending=True, stable=True)

    def int32(self, array: Array) -> Array:
        return array.int()

    def float32(self, array: Array) -> Array:
        return array.float()

    def float64(self, array: Array) -> Array:
        return array.double()
