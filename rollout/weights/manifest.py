"""The manifest of an update: the names, shapes and dtypes to come, and the options it was called
with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch

from rollout.checked import checked_flag, checked_seconds
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
    """The shape and dtype of a tensor that has not come yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tensor.shape, tensor.dtype)


Manifest = Mapping[str, TensorSpec]
"""Shapes and dtypes by checkpoint name."""


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


T = TypeVar("T")


@contextmanager
def closed_iterator(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """Iterate, and tell a generator on leaving that nobody will ask for more.

    Its frame may outlive whoever iterates, in a traceback for one, and a sharded source has other
    ranks waiting in its collectives until it is closed.
    """
    iterator = iter(items)
    try:
        yield iterator
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOptions:
    """The keywords every update call takes."""

    selector: str = "all"  # or one part: target, draft, draft_step_<i>
    # Requests in flight recompute their KV; the prefix cache goes either way. An update that leaves
    # the target alone leaves all of it alone too.
    flush_cache: bool = True
    abort_all_requests: bool = False  # requests in flight end with what they have
    # Of the target where the update reaches it, else of the parts it reaches. Default: one more
    # than the one in use.
    weight_version: int | None = None
    partial: bool = False  # names that do not come keep their values; else each must come
    check_finite: bool = False  # refuse NaN and infinities
    timeout: float = 300.0  # seconds without a call after which an open update counts as abandoned

    def __post_init__(self) -> None:
        """Raises InvalidInputError. Which selectors there are `WeightParts` says."""
        for name in ("flush_cache", "abort_all_requests", "partial", "check_finite"):
            checked_flag(getattr(self, name), name)
        checked_seconds(self.timeout, "timeout")
        version = self.weight_version
        if version is not None and not (type(version) is int and 0 <= version < 2**63):
            raise InvalidInputError("weight_version", version, "must be an integer >= 0")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Raises InvalidInputError, also for a keyword there is not."""
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise InvalidInputError(name, value, f"is no option; there are {', '.join(known)}")
        return cls(**options)
