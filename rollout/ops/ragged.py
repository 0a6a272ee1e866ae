"""Index arrays over rows of unequal lengths. Legend: B rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def offsets_of(lens_B: NDArray[np.integer]) -> NDArray[np.int64]:
    """Offsets of rows stored one after another: int64 [B + 1], the last one the total length."""
    offsets_B1 = np.zeros(lens_B.size + 1, dtype=np.int64)
    lens_B.cumsum(out=offsets_B1[1:])
    return offsets_B1


def ranges(firsts_B: NDArray[np.integer], lens_B: NDArray[np.integer]) -> NDArray[np.int64]:
    """The concatenated ranges [first, first + length) of all rows: int64 [sum of lens]."""
    ends_B = lens_B.cumsum(dtype=np.int64)
    total = int(ends_B[-1]) if ends_B.size else 0
    return np.arange(total) + (firsts_B - ends_B + lens_B).repeat(lens_B)
