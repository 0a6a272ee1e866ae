"""Weight sources: what an update brings, whatever way it comes.

A caller makes one and hands it to ``update_weights``; every rank reads it, as `WeightTensors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from rollout.errors import InvalidInputError
from rollout.weights.manifest import Manifest, Slices, TensorSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter)

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WeightSource:
    def manifest(self) -> Manifest | None:
        """Names, shapes and dtypes of all that will come, as far as known without reading it; None:
        not known. Raises InvalidInputError for what cannot be weights."""
        return None


def not_a_source(given: object) -> InvalidInputError:
    """The error of an ``update_weights`` that is given something else."""
    remedy = "must be a source of rollout.weights; update_weights_from_tensor takes tensors"
    return InvalidInputError("source", type(given).__name__, remedy)


class WeightTensors(WeightSource, ABC):
    is_stored = False
    """Whether all tensors lie in memory or in files before the first is read. Then they may be read
    again and again and stay valid: values too are checked before the first is written."""

    is_direct = False
    """Whether nothing is converted: a dtype that is not the model's is refused."""

    own_options: Mapping[str, Any] = MappingProxyType({})
    """Options that an update with these tensors has unless it is given others."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors. Unless stored, each is valid until the next one is asked for."""

    def sliced(self, needed: Slices) -> Iterator[tuple[str, torch.Tensor]]:
        """The needed slices of these tensors. Others come whole or are left out."""
        with closed_iterator(self) as tensors:
            for name, tensor in tensors:
                where = needed.get(name)
                yield name, tensor if where is None else where.of(tensor)
                del tensor  # which would lie beside the next

    def tensors_to_check(self) -> NamedTensors:
        """The tensors whose values this rank checks before the first is written."""
        return self if self.is_stored else ()

    checks_for_all = False
    """Whether this rank checks what other ranks need of the tensors too."""


class TensorSource(WeightTensors):
    """Tensors of this process: pairs of name and tensor, or a mapping. Of a collection all is
    known, of a generator nothing.

    Args:
        load_format: None, or ``direct``: see `is_direct`.
    """

    def __init__(
        self,
        named_tensors: NamedTensors | Mapping[str, torch.Tensor],
        load_format: str | None = None,
    ) -> None:
        self._given: Any = named_tensors
        if isinstance(named_tensors, Mapping):
            self._given = named_tensors.items()
        self._load_format = load_format
        self.is_direct = isinstance(load_format, str) and load_format == "direct"
        self.is_stored = isinstance(self._given, Collection)

    def manifest(self) -> Manifest | None:
        """The manifest of a collection, whose tensors are checked on the way."""
        if self._load_format is not None and not self.is_direct:
            raise InvalidInputError(
                "load_format", self._load_format, "must be None, direct or flattened_bucket"
            )
        given, texts = self._given, str | bytes | torch.Tensor
        if isinstance(given, texts) or not isinstance(given, Iterable):
            raise InvalidInputError(
                "named_tensors", given, "must be pairs of name and tensor, or a mapping"
            )
        if not isinstance(given, Collection):
            return None
        manifest: dict[str, TensorSpec] = {}
        for pair in given:
            name, tensor = checked_pair(pair)
            manifest[name] = spec_of(name, tensor)
        if len(manifest) < len(given):
            raise InvalidInputError("named_tensors", len(given), "holds a name twice")
        return manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._given)


def checked_pair(pair: object) -> tuple[str, torch.Tensor]:
    """A name and what should be its tensor."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise InvalidInputError("named_tensors", pair, "must be a pair of name and tensor")
    return pair[0], pair[1]


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of a tensor that can be copied. Raises InvalidInputError for others."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta:
        return TensorSpec(tensor.shape, tensor.dtype)
    remedy = ""
    if not isinstance(tensor, torch.Tensor):
        remedy = "must be a torch.Tensor"
    elif hasattr(tensor, "full_tensor"):
        remedy = "is a shard: send full_tensor(), or rollout.trainers.weight_source(model)"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        remedy = "must be a dense tensor with values of its own"
    if remedy:
        raise InvalidInputError(f"named_tensors[{name!r}]", type(tensor).__name__, remedy)
    return TensorSpec.of(tensor)


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInputError if the tensor holds NaN or infinities."""
    # A sum is finite only if all it adds is, and takes a thirtieth of the time of looking at each.
    if not bool(tensor.sum().isfinite()) and not bool(torch.isfinite(tensor).all()):
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
