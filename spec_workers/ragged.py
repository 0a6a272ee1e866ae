"""Index arrays over rows of unequal lengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of, ranges

__all__ = ["offsets_of", "places_within"]


def places_within(lens_B: NDArray) -> NDArray[np.int64]:
    """0, 1, ... of each, one behind the other: int64 [sum of lens]."""
    return ranges(np.zeros(len(lens_B), dtype=np.int64), lens_B)
