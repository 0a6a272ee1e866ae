"""Checks of offered tensors. Each raises InvalidInputError with a list of all problems."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.weight_loader import WeightLoader, mismatches, same_values
from rollout.weights.manifest import Manifest, NamedTensors, TensorSpec, WeightSource

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LISTED = 8


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


def refuse_mismatches(
    weight_loaders: Mapping[str, WeightLoader], offered: Manifest, *, partial: bool
) -> None:
    """Unknown names, wrong shapes, odd dtypes and, unless partial, missing names."""
    shapes = {name: spec.shape for name, spec in offered.items()}
    lines = mismatches(weight_loaders, shapes, partial=partial)
    lines += [
        f"wrong dtype: {name} is {spec.dtype}, must be one of float64, float32, float16, bfloat16"
        for name, spec in offered.items()
        if spec.dtype not in _DTYPES
    ]
    _refuse(lines)


def refuse_incoming(
    weight_loaders: Mapping[str, WeightLoader],
    announced: Manifest | None,
    loaded: Manifest,
    incoming: Manifest,
) -> None:
    """Raise unless tensors fit the model, were announced (if any were), and come once."""
    refuse_mismatches(weight_loaders, incoming, partial=True)
    lines = [f"came twice: {name}" for name in incoming if name in loaded]
    if announced is not None:
        lines += [
            f"not as announced: {name} is {spec}, announced was {announced.get(name)}"
            for name, spec in incoming.items()
            if announced.get(name) != spec
        ]
    _refuse(lines)


def refuse_conversion(weight_loaders: Mapping[str, WeightLoader], incoming: Manifest) -> None:
    """Raise unless tensors that are written unconverted have the model's dtype."""
    _refuse(
        [
            f"wrong dtype: {name} is {spec.dtype}, the model has {weight_loaders[name].dtype} and "
            "load_format='direct' converts nothing"
            for name, spec in incoming.items()
            if spec.dtype is not weight_loaders[name].dtype
        ]
    )


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


def refuse_untied(
    weight_loaders: Mapping[str, WeightLoader], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Two names of one tensor must carry one value."""
    for name, tensor in tensors.items():
        other = tensors.get(weight_loaders[name].alias_of or name)
        if other is not None and other is not tensor and not same_values(tensor, other):
            raise InvalidInputError(
                "named_tensors",
                name,
                f"differs from {weight_loaders[name].alias_of}, its tied twin",
            )


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInputError if the tensor holds NaN or infinities."""
    if not bool(torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        raise InvalidInputError(
            f"named_tensors[{name!r}]", f"{count} values of {tensor.numel()}",
            "are NaN or infinite; the trainer has diverged, or check_finite=False takes them",
        )  # fmt: skip


def _refuse(lines: list[str]) -> None:
    if lines:
        more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
        remedy = f"must match the model's own: {'; '.join(lines[:_LISTED])}{more}"
        raise InvalidInputError("named_tensors", f"{len(lines)} mismatches", remedy)
