"""Parts of what an earlier run learned, read from JSON that may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def mapping(learned: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Raises ValueError for what is none."""
    part = learned.get(name)
    if not isinstance(part, Mapping):
        raise ValueError(f"{name}: must be an object")
    return part


def table(
    learned: Mapping[str, Any], name: str, shape: tuple[int, ...], *, least: float = 0.0
) -> NDArray[np.float64]:
    """Finite numbers >= ``least``. Raises ValueError for what is none."""
    try:
        numbers = np.array(learned.get(name), dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: must be numbers") from None
    if numbers.shape != shape:
        raise ValueError(f"{name}: must be of shape {shape}, not {numbers.shape}")
    if not np.isfinite(numbers).all() or numbers.min() < least:
        raise ValueError(f"{name}: must be finite and >= {least:g}")
    return numbers
