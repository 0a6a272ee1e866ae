"""Parts of what an earlier run learned, read from JSON that may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_VALUE = 1e12
"""The largest value that is believed, in milliseconds or times seen. A larger one is damage, and
sums of it would overflow."""


def mapping(learned: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of this name. Raises ValueError for anything else."""
    part = learned.get(name)
    if not isinstance(part, Mapping):
        raise ValueError(f"{name}: must be an object")
    return part


def table(
    learned: Mapping[str, Any], name: str, shape: tuple[int, ...], *, minimum: float = 0.0
) -> NDArray[np.float64]:
    """An array of this shape of numbers in [``minimum``, `MAX_VALUE`]. Raises ValueError for
    anything else."""
    value = learned.get(name)
    if not _has_shape(value, shape):
        raise ValueError(f"{name}: must be numbers of shape {shape}")
    try:
        numbers = np.array(value, dtype=np.float64)
    except OverflowError:  # an integer beyond all floats
        numbers = np.full(shape, np.inf)
    if not ((numbers >= minimum) & (numbers <= MAX_VALUE)).all():
        raise ValueError(f"{name}: must be in [{minimum:g}, {MAX_VALUE:g}]")
    return numbers


def _has_shape(value: object, shape: tuple[int, ...]) -> bool:
    if not shape:
        return type(value) in (int, float)  # no text that spells one, and no boolean
    if not isinstance(value, list) or len(value) != shape[0]:
        return False
    return all(_has_shape(each, shape[1:]) for each in value)
