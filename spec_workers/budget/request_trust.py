"""How far the drafts of one request can be believed: some rollouts go their own way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_INERTIA = 5.0  # expected acceptances that all requests together count for
_MEMORY = 30.0  # expected acceptances remembered


class RequestTrust:
    """The ratio of accepted draft nodes to expected ones, per request, drawn towards 1."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # request id -> expected, accepted

    def ratios(self, request_ids: Sequence[int]) -> NDArray[np.float64]:
        """Float64, one per request; 1 for a request of which nothing is known."""
        if not self._seen:
            return np.ones(len(request_ids))
        nothing = (0.0, 0.0)
        seen = np.array([self._seen.get(each, nothing) for each in request_ids]).reshape(-1, 2)
        return (seen[:, 1] + _INERTIA) / (seen[:, 0] + _INERTIA)

    def observe(self, request_id: int, expected: float, accepted: int) -> None:
        """Of nodes that were verified; ``expected`` without this correction."""
        before = self._seen.get(request_id, (0.0, 0.0))
        expected, total = before[0] + expected, before[1] + accepted
        keep = 0.5 if expected > _MEMORY else 1.0
        self._seen[request_id] = (expected * keep, total * keep)

    def forget(self, request_id: int) -> None:
        self._seen.pop(request_id, None)
