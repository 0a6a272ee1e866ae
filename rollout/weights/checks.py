"""What is wrong with tensors that are offered. Each check raises InvalidInputError, listing all."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout.errors import InvalidInputError
from rollout.layers.destination import Destination, mismatches
from rollout.weights.manifest import Manifest

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LISTED = 8


def refuse_mismatches(
    destinations: Mapping[str, Destination], offered: Manifest, *, partial: bool
) -> None:
    """Unknown names, wrong shapes, odd dtypes and, unless partial, missing names."""
    shapes = {name: spec.shape for name, spec in offered.items()}
    lines = mismatches(destinations, shapes, partial=partial)
    lines += [
        f"wrong dtype: {name} is {spec.dtype}, must be one of float64, float32, float16, bfloat16"
        for name, spec in offered.items()
        if spec.dtype not in _DTYPES
    ]
    _refuse(lines)


def refuse_incoming(
    destinations: Mapping[str, Destination],
    announced: Manifest | None,
    loaded: Manifest,
    incoming: Manifest,
) -> None:
    """What comes must fit the model, be what was announced, if anything was, and come once."""
    refuse_mismatches(destinations, incoming, partial=True)
    lines = [f"came twice: {name}" for name in incoming if name in loaded]
    if announced is not None:
        lines += [
            f"not as announced: {name} is {spec}, announced was {announced.get(name)}"
            for name, spec in incoming.items()
            if announced.get(name) != spec
        ]
    _refuse(lines)


def refuse_conversion(destinations: Mapping[str, Destination], incoming: Manifest) -> None:
    """What is written as it is must be of the model's dtype."""
    _refuse(
        [
            f"wrong dtype: {name} is {spec.dtype}, the model has {destinations[name].dtype} and "
            "load_format='direct' converts nothing"
            for name, spec in incoming.items()
            if spec.dtype is not destinations[name].dtype
        ]
    )


def refuse_untied(
    destinations: Mapping[str, Destination], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Two names of one tensor must carry one value."""
    for name, tensor in tensors.items():
        other = tensors.get(destinations[name].alias_of or name)
        if other is not None and other is not tensor and not torch.equal(other, tensor):
            raise InvalidInputError(
                "named_tensors", name, f"differs from {destinations[name].alias_of}, its tied twin"
            )


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
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
