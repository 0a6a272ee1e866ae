"""The manifest of an update: names, shapes and dtypes, known before a byte moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from rollout.errors import InvalidInputError


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def named_dtype(value: object, field: str) -> torch.dtype:
    """The dtype called ``bfloat16`` or ``torch.bfloat16``; a torch.dtype is its own name.

    Any that torch has: which of them weights may have is for the transaction to say. Raises
    InvalidInputError, naming ``field``, for anything else.
    """
    name = str(value) if isinstance(value, (str, torch.dtype)) else ""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInputError(field, value, "must be the name of a dtype, as bfloat16")
    return dtype


NamedTensors = Iterable[tuple[str, torch.Tensor]]


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tensor.shape, tensor.dtype)


Manifest = Mapping[str, TensorSpec]
"""Checkpoint names and what comes under them."""


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors of which names, shapes and dtypes are known beforehand."""

    def manifest(self) -> Manifest:
        """The manifest of what iterating will yield: whole tensors, however they are sharded
        now."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor is valid until the next one is asked for."""
        ...


class StoredWeights(ABC):
    """A WeightSource whose tensors all lie in memory or in files before an update begins.

    It may be read again and again, and what it yielded stays valid: so values too are checked
    before the first is written.
    """

    @abstractmethod
    def manifest(self) -> Manifest: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...
