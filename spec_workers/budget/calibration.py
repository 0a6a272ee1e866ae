"""How often draft nodes are accepted, by source and by the probability that was claimed for them.

Legend: N draft nodes; S sources, T tenths of probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TENTHS = 10
_FIRST_RATIO = 0.85  # of accepted to claimed: the highest of many estimates run high
_INERTIA = 20.0  # claimed acceptances that the first ratio counts for
_MEMORY = 400.0  # claimed acceptances that a cell remembers
_DECAY = 0.5  # at a change of policy


class Calibration:
    """Corrects claimed probabilities by the ratio of accepted to claimed nodes of their tenth."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = tuple(sources)
        shape = (len(self.sources), _TENTHS)
        self._counts_ST = np.zeros(shape)
        self._claimed_ST = np.zeros(shape)
        self._accepted_ST = np.zeros(shape)
        self._ratio_ST = np.full(shape, _FIRST_RATIO)

    @property
    def highest_ratio(self) -> float:
        """The largest factor by which any probability is corrected."""
        return float(self._ratio_ST.max())

    def corrected(self, probs_N: NDArray[np.floating], sources_N: NDArray) -> NDArray[np.float64]:
        """A worker's probabilities, corrected: float64, in [0, 1]."""
        ratio_N = self._ratio_ST.reshape(-1)[_cells(probs_N, sources_N)]
        return np.minimum(probs_N * ratio_N, 1.0)

    def observe(
        self, probs_N: NDArray[np.floating], sources_N: NDArray, accepted_N: NDArray[np.bool_]
    ) -> None:
        """Learn from nodes of which it is known whether they were accepted."""
        if not probs_N.size:
            return
        cells_N, shape = _cells(probs_N, sources_N), self._ratio_ST.shape
        for sums_ST, weights_N in (
            (self._counts_ST, None),
            (self._claimed_ST, probs_N),
            (self._accepted_ST, accepted_N),
        ):
            sums_ST += np.bincount(cells_N, weights_N, self._ratio_ST.size).reshape(shape)
        self._forget(np.where(self._claimed_ST > _MEMORY, 0.5, 1.0))

    def decay(self) -> None:
        """Let what was learned count for less, as the policy has changed."""
        self._forget(_DECAY)

    def learned(self) -> dict[str, Any]:
        """The table as a JSON-able object, for people to look at."""
        return {
            "sources": list(self.sources),
            "count": self._counts_ST.round(3).tolist(),
            "expected": self._claimed_ST.round(3).tolist(),
            "accepted": self._accepted_ST.round(3).tolist(),
        }

    def _forget(self, kept_ST: NDArray[np.float64] | float) -> None:
        for sums_ST in (self._counts_ST, self._claimed_ST, self._accepted_ST):
            sums_ST *= kept_ST
        accepted_ST = self._accepted_ST + _FIRST_RATIO * _INERTIA
        self._ratio_ST = accepted_ST / (self._claimed_ST + _INERTIA)


def _cells(probs_N: NDArray[np.floating], sources_N: NDArray) -> NDArray[np.intp]:
    tenths_N = np.minimum((probs_N * _TENTHS).astype(np.intp), _TENTHS - 1)
    return sources_N.astype(np.intp) * _TENTHS + tenths_N


_REQUEST_INERTIA = 5.0  # expected acceptances that all requests together count for
_REQUEST_MEMORY = 30.0  # expected acceptances remembered


class RequestTrust:
    """The ratio of accepted to expected nodes of each request, drawn towards 1."""

    def __init__(self) -> None:
        self._ratios: dict[int, tuple[float, float]] = {}  # request id -> expected, accepted

    def ratios(self, request_ids: Sequence[int]) -> NDArray[np.float64]:
        """Float64, one per request; 1 for a request of which nothing is known."""
        seen = np.array([self._ratios.get(each, (0.0, 0.0)) for each in request_ids]).reshape(-1, 2)
        return (seen[:, 1] + _REQUEST_INERTIA) / (seen[:, 0] + _REQUEST_INERTIA)

    def observe(self, request_id: int, expected: float, accepted: float) -> None:
        """Learn from nodes whose fate is known. ``expected``: by corrected probabilities."""
        before = self._ratios.get(request_id, (0.0, 0.0))
        expected, accepted = before[0] + expected, before[1] + accepted
        decay = 0.5 if expected > _REQUEST_MEMORY else 1.0
        self._ratios[request_id] = expected * decay, accepted * decay

    def forget(self, request_id: int) -> None:
        self._ratios.pop(request_id, None)
