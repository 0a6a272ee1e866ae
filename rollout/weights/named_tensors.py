"""The tensors of an update as they are handed over: pairs of name and tensor, or a `WeightSource`,
which knows its manifest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

import torch

from rollout.errors import InvalidInputError
from rollout.weights.manifest import Manifest, Slices, TensorSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter)

NamedTensors = Iterable[tuple[str, torch.Tensor]]


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


@runtime_checkable
class SlicedSource(WeightSource, Protocol):
    """A WeightSource that brings a rank what it needs in place of whole tensors."""

    def sliced(self, needed: Slices) -> Iterator[tuple[str, torch.Tensor]]:
        """The needed slices of these tensors, each valid until the next is asked for. Others may
        be left out."""
        ...


class StoredWeights(ABC):
    """A WeightSource whose tensors all lie in memory or in files before an update begins.

    It may be read again and again, and what it yielded stays valid: so values too are checked
    before the first is written.
    """

    checks_for_all = False
    """Whether this rank checks what other ranks need of the tensors too."""

    @abstractmethod
    def manifest(self) -> Manifest: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def unchecked(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors whose values this rank has to check."""
        return self


def pairs_of(named_tensors: object) -> NamedTensors:
    """Names and tensors as a caller handed them over: a mapping's items, or the iterable itself."""
    if isinstance(named_tensors, Mapping):
        return named_tensors.items()
    wrong = str | bytes | torch.Tensor
    if isinstance(named_tensors, wrong) or not isinstance(named_tensors, Iterable):
        raise InvalidInputError(
            "named_tensors", named_tensors, "must be pairs of name and tensor, or a mapping"
        )
    if isinstance(named_tensors, Collection):
        for pair in named_tensors:
            checked_pair(pair)
    return named_tensors


def checked_pair(pair: object) -> tuple[str, torch.Tensor]:
    """A name and what should be its tensor."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise InvalidInputError("named_tensors", pair, "must be a pair of name and tensor")
    return pair[0], pair[1]


def manifest_of(named_tensors: NamedTensors) -> Manifest | None:
    """The manifest of tensors as known now: all of a source or a collection, nothing of a
    generator."""
    if isinstance(named_tensors, WeightSource):
        return named_tensors.manifest()
    if not isinstance(named_tensors, Collection):
        return None
    for name, tensor in named_tensors:
        refuse_unreadable(name, tensor)
    manifest = {name: TensorSpec.of(tensor) for name, tensor in named_tensors}
    if len(manifest) < len(named_tensors):
        raise InvalidInputError("named_tensors", len(named_tensors), "holds a name twice")
    return manifest


def refuse_unreadable(name: str, tensor: object) -> None:
    """A tensor whose values cannot simply be copied."""
    remedy = ""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta:  # type: ignore[attr-defined]
        return
    if not isinstance(tensor, torch.Tensor):
        remedy = "must be a torch.Tensor"
    elif hasattr(tensor, "full_tensor"):
        remedy = "is a shard: send full_tensor(), or rollout.trainers.weight_source(model)"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        remedy = "must be a dense tensor with values of its own"
    if remedy:
        raise InvalidInputError(f"named_tensors[{name!r}]", type(tensor).__name__, remedy)


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInputError if the tensor holds NaN or infinities."""
    if not bool(torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        raise InvalidInputError(
            f"named_tensors[{name!r}]", f"{count} values of {tensor.numel()}",
            f"are NaN or infinite in {tensor.dtype}; the trainer has diverged, or "
            "check_finite=False takes them",
        )  # fmt: skip


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
