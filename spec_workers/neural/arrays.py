"""One name for operations that numpy and torch name differently, for code that runs on both.

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

from rollout.ops.transfers import download

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

    def masked(self, mask: Array, array: Array, other: float) -> Array:
        """The array where the mask holds, and elsewhere the number."""
        return np.where(mask, array, np.array(other, dtype=array.dtype))

    def descending(self, array: Array) -> Array:
        """The columns of each row, the highest value first, of equals the first column."""
        return np.argsort(-array, axis=1, kind="stable")

    def ranks(self, array: Array, first: int) -> tuple[Array, Array]:
        """The rank of each column from ``first`` on in its row, then among those columns: 0 for the
        highest value, of equals for the first column."""
        return self._ranks(array)[:, first:], self._ranks(array[:, first:])

    def _ranks(self, array: Array) -> Array:
        ranks = np.empty(array.shape, dtype=np.int64)
        np.put_along_axis(ranks, self.descending(array), np.arange(array.shape[1])[None], axis=1)
        return ranks

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

    def masked(self, mask: Array, array: Array, other: float) -> Array:
        # `torch.where` would make a tensor of the number.
        return array.masked_fill(mask.logical_not(), other)

    def descending(self, array: Array) -> Array:
        return torch.argsort(array, dim=1, descending=True, stable=True)

    def ranks(self, array: Array, first: int) -> tuple[Array, Array]:
        # Comparisons of all with all, for they are few and a sort takes longer.
        column = self.arange(array.shape[1])
        own, others = array[:, first:, None], array[:, None, :]
        is_older = column < column[first:, None]
        is_before = (others > own) | ((others == own) & is_older)
        return is_before.sum(dim=2), is_before[:, :, first:].sum(dim=2)

    def int32(self, array: Array) -> Array:
        return array.int()

    def float32(self, array: Array) -> Array:
        return array.float()

    def float64(self, array: Array) -> Array:
        return array.double()
