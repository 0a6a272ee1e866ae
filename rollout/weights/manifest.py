"""The manifest of an update: the names, shapes and dtypes to come, the tensors as they are handed
over, and the options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isfinite, prod
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.weight_loader import TensorSlice
from rollout.validation import checked_flag, checked_int, checked_list, checked_seconds

_PLAIN = (torch.Tensor, torch.nn.Parameter)


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


Slices = Mapping[str, TensorSlice | None]
"""What a rank needs of tensors by name: a slice, or None for all of it."""


def slices_to_json(needed: Slices) -> dict[str, Any]:
    """A JSON object of slices, which `slices_from_json` reads."""
    return {
        name: where and [where.dim, [[each.start, each.stop] for each in where.ranges]]
        for name, where in needed.items()
    }


def slices_from_json(value: object, manifest: Manifest, field: str) -> Slices:
    """Slices of the manifest's tensors. Raises InvalidInputError, naming the field, for anything
    `slices_to_json` would not write."""
    if not isinstance(value, Mapping) or not value.keys() <= manifest.keys():
        raise InvalidInputError(field, value, "must be an object of slices by tensors' names")
    return {
        name: where and _slice(where, manifest[name].shape, f"{field}[{name!r}]")
        for name, where in value.items()
    }


def _slice(value: object, shape: Sequence[int], field: str) -> TensorSlice:
    items = checked_list(value, field)
    if len(items) != 2:
        raise InvalidInputError(field, value, "must be a dimension and ranges")
    dim = checked_int(items[0], f"{field}.dim", maximum=len(shape) - 1)
    ranges: list[range] = []
    for each in checked_list(items[1], f"{field}.ranges"):
        ends = [checked_int(end, field, maximum=shape[dim]) for end in checked_list(each, field)]
        if len(ends) != 2 or not (ranges[-1].stop if ranges else 0) <= ends[0] <= ends[1]:
            raise InvalidInputError(f"{field}.ranges", value, "must be ascending ranges")
        ranges.append(range(*ends))
    return TensorSlice(dim, tuple(ranges))


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


LISTED = 8  # names in an error


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInputError if the tensor holds NaN or infinities."""
    if not bool(torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        raise InvalidInputError(
            f"named_tensors[{name!r}]", f"{count} values of {tensor.numel()}",
            f"are NaN or infinite in {tensor.dtype}; the trainer has diverged, or "
            "check_finite=False takes them",
        )  # fmt: skip


def refuse_mismatched(lines: list[str]) -> None:
    """Raise InvalidInputError where there is a line, each of which says what does not fit."""
    if lines:
        more = f"; and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
        remedy = f"must match the model's own: {'; '.join(lines[:LISTED])}{more}"
        raise InvalidInputError("named_tensors", f"{len(lines)} mismatches", remedy)


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
    # The target's where the update reaches it, else that of the parts it reaches. Default: one more
    # than the one in use.
    weight_version: int | None = None
    partial: bool = False  # names that do not come keep their values; else each must come
    # The version that what comes is the difference to: refused unless it is the one in use. Then
    # `partial`, and places of tensors may come (`delta`).
    base_version: int | None = None
    lora_scaling: float | None = None  # LoRA adapters come (`lora`), scaled so; then `partial`
    check_finite: bool = False  # refuse NaN and infinities
    timeout: float = 300.0  # seconds without a call after which an open update counts as abandoned

    def __post_init__(self) -> None:
        """Raises InvalidInputError. Which selectors there are `WeightParts` says."""
        for name in ("flush_cache", "abort_all_requests", "partial", "check_finite"):
            checked_flag(getattr(self, name), name)
        checked_seconds(self.timeout, "timeout")
        scaling = self.lora_scaling
        if scaling is not None and not (type(scaling) in (int, float) and isfinite(scaling)):
            raise InvalidInputError("lora_scaling", scaling, "must be a finite number")
        for name in ("weight_version", "base_version"):
            version = getattr(self, name)
            if version is not None and not (type(version) is int and 0 <= version < 2**63):
                raise InvalidInputError(name, version, "must be an integer >= 0")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Raises InvalidInputError, also for a keyword there is not."""
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise InvalidInputError(name, value, f"is no option; there are {', '.join(known)}")
        is_difference = any(
            options.get(name) is not None for name in ("base_version", "lora_scaling")
        )
        return cls(**{"partial": is_difference, **options})
