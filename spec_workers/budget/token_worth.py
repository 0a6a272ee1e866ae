"""What an emitted token is worth to the step it is part of: milliseconds of plain decoding.

Legend: B sampling entries; K ranks, 1 for the last request to end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LEAST = np.finfo(np.float64).tiny
"""Where thousands are equal and all but the last cost nothing, closeness to it rounds to 0."""


def token_worth(
    remaining_B: NDArray[np.float64], decode_ms_B: NDArray[np.float64], ends: bool
) -> NDArray[np.float64]:
    """What one token more of each request spares, in milliseconds; their sum is a decode step's.

    While others wait for the seats every token brings the end equally near. When none do, a request
    that ends one step sooner spares the difference between decoding with it and without it, when
    its turn comes to be the last of k: little for the first to end, whole steps for the last. Which
    turn that will be is uncertain; lifetimes are taken for exponential with the expected
    means, so that i outlives j with probability m_i / (m_i + m_j).

    Args:
        remaining_B: tokens each request is expected to emit yet, > 0.
        decode_ms_B: time of a plain step of 1, 2, ..., B requests, non-decreasing.
        ends: nobody waits: the step ends with these.
    """
    size = remaining_B.size
    share = decode_ms_B[-1] / size
    if not ends or size == 1:
        return np.full(size, share)
    outlives_BB = remaining_B[:, None] / (remaining_B[:, None] + remaining_B)
    survivors_B = (1.0 - outlives_BB).sum(1) - 0.5  # who outlives i; itself it does not
    variance_B = (outlives_BB * (1.0 - outlives_BB)).sum(1) - 0.25
    spared_K = np.diff(decode_ms_B, prepend=0.0)
    rank_K = np.arange(size)
    closeness_BK = np.exp(-((rank_K - survivors_B[:, None]) ** 2) / (2 * variance_B[:, None] + 0.1))
    worth_B = closeness_BK @ spared_K / closeness_BK.sum(1) + _LEAST
    return worth_B * (decode_ms_B[-1] / worth_B.sum())
