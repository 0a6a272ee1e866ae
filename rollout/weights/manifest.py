"""The manifest of an update: names, shapes and dtypes of tensors, known before they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.weight_loader import TensorSlice
from rollout.validation import checked_int, checked_list


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
"""Shapes and dtypes by checkpoint name."""


Slices = Mapping[str, TensorSlice | None]
"""What a rank needs of tensors by name: a slice, or None for all of it."""


def slices_to_json(needed: Slices) -> dict[str, Any]:
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


LISTED = 8  # names in an error


def refuse_mismatched(lines: list[str]) -> None:
    """Raise InvalidInputError where there is a line, each of which says what does not fit."""
    if lines:
        more = f"; and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
        remedy = f"must match the model's own: {'; '.join(lines[:LISTED])}{more}"
        raise InvalidInputError("named_tensors", f"{len(lines)} mismatches", remedy)
