"""Index arrays over rows of unequal lengths. Legend: B rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def offsets_of(lens_B: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each begins and the last ends, one behind the other: int64 [B + 1]."""
    offsets_B1 = np.zeros(lens_B.size + 1, dtype=np.int64)
    lens_B.cumsum(out=offsets_B1[1:])
    return offsets_B1


def ranges(firsts_B: NDArray[np.integer], lens_B: NDArray[np.integer]) -> NDArray[np.int64]:
    """The numbers [first, first + length) of each, one behind the other: int64 [sum of lens]."""
    offsets_B1 = offsets_of(lens_B)
    return np.arange(offsets_B1[-1]) + (firsts_B - offsets_B1[:-1]).repeat(lens_B)
