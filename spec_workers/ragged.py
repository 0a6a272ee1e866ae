"""Index arrays over rows of unequal lengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def offsets_of(lens_B: NDArray) -> NDArray[np.int64]:
    """Where each begins and the last ends: int64 [B + 1]."""
    offsets_B1 = np.zeros(len(lens_B) + 1, dtype=np.int64)
    np.cumsum(lens_B, out=offsets_B1[1:])
    return offsets_B1


def places_within(lens_B: NDArray) -> NDArray[np.int64]:
    """0, 1, ... of each, one behind the other: int64 [sum of lens]."""
    offsets_B1 = offsets_of(lens_B)
    return np.arange(offsets_B1[-1]) - np.repeat(offsets_B1[:-1], lens_B)
