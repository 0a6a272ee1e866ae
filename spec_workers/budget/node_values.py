"""Corrections of draft nodes' estimated probabilities, by source, depth and request.

Legend: N draft nodes; S sources, D depth buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTHS = ("1", "2", "3-4", "5+")
_BUCKET_OF_DEPTH = np.array([0, 0, 1, 2, 2, 3])  # into DEPTHS

_INERTIA = 20.0  # expected acceptances that the first guess is worth
_FIRST_GUESS = 0.85  # accepted, of what was expected: the highest of many estimates run high
_MEMORY = 400.0  # expected acceptances a cell remembers
_DECAY = 0.5  # at a change of policy
_FADE = 0.995  # each time costs are learned
_TENTHS = 10  # of probability, by which the report compares expected with accepted


class NodeValues:
    """Corrects estimated probabilities of acceptance, per source and depth.

    The factor is the ratio of accepted to expected nodes. Proposers calibrate their estimates by
    finer evidence; this corrects what remains, such as the bias of picking the highest.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        """``sources``: names of the values of ``sources_N``."""
        self.sources = tuple(sources)
        shape = (len(self.sources), len(DEPTHS))
        self._expected_SD = np.zeros(shape)
        self._accepted_SD = np.zeros(shape)
        self._ratio_SD = np.full(shape, _FIRST_GUESS)
        self._by_tenth = np.zeros((3, _TENTHS))  # nodes, expected, accepted

    @property
    def highest_ratio(self) -> float:
        """The largest factor by which any estimate is corrected."""
        return float(self._ratio_SD.max())

    def corrected(
        self, probs_N: NDArray[np.floating], sources_N: NDArray, depths_N: NDArray
    ) -> NDArray[np.float64]:
        """A worker's estimates, corrected: float64, in [0, 1]."""
        return np.minimum(probs_N * self._ratio_SD[sources_N, _bucket(depths_N)], 1.0)

    def observe(
        self,
        probs_N: NDArray[np.floating],
        sources_N: NDArray,
        depths_N: NDArray,
        accepted_N: NDArray[np.bool_],
    ) -> None:
        """Learn from verified nodes and the estimates they came with."""
        if not probs_N.size:
            return
        corrected_N = self.corrected(probs_N, sources_N, depths_N)  # before it knew better
        cells_N = sources_N.astype(np.intp) * len(DEPTHS) + _bucket(depths_N)
        count, shape = self._expected_SD.size, self._expected_SD.shape
        self._expected_SD += np.bincount(cells_N, probs_N, count).reshape(shape)
        self._accepted_SD += np.bincount(cells_N, accepted_N, count).reshape(shape)
        full = self._expected_SD > _MEMORY
        if full.any():
            self._expected_SD[full] *= 0.5
            self._accepted_SD[full] *= 0.5
        self._update_ratios()
        tenth_N = np.minimum((corrected_N * _TENTHS).astype(np.intp), _TENTHS - 1)
        for row, weights in enumerate((None, corrected_N, accepted_N)):
            self._by_tenth[row] += np.bincount(tenth_N, weights, _TENTHS)

    def decay(self) -> None:
        """Let what was learned count for less, as the policy has changed."""
        self._expected_SD *= _DECAY
        self._accepted_SD *= _DECAY
        self._update_ratios()

    def fade(self) -> None:
        """Let old observations count for less, so that nodes whose value sank until nobody verified
        them get another chance."""
        self._expected_SD *= _FADE
        self._accepted_SD *= _FADE
        self._update_ratios()

    def learned(self) -> dict[str, Any]:
        """The learned values as a JSON-able object, for people to look at."""
        count, expected, accepted = self._by_tenth.round(3).tolist()
        return {
            "values": {
                "sources": list(self.sources),
                "depths": list(DEPTHS),
                "expected": self._expected_SD.round(3).tolist(),
                "accepted": self._accepted_SD.round(3).tolist(),
            },
            "calibration": {"count": count, "expected": expected, "accepted": accepted},
        }

    def _update_ratios(self) -> None:
        accepted_SD = self._accepted_SD + _FIRST_GUESS * _INERTIA
        self._ratio_SD = accepted_SD / (self._expected_SD + _INERTIA)


def _bucket(depths_N: NDArray) -> NDArray[np.intp]:
    return _BUCKET_OF_DEPTH[np.minimum(depths_N, len(_BUCKET_OF_DEPTH) - 1)]


_REQUEST_INERTIA = 5.0  # expected acceptances that all requests together count for
_REQUEST_MEMORY = 30.0  # expected acceptances remembered


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
        return (seen[:, 1] + _REQUEST_INERTIA) / (seen[:, 0] + _REQUEST_INERTIA)

    def observe(self, request_id: int, expected: float, accepted: int) -> None:
        """Learn from verified nodes. ``expected``: by estimates without this correction."""
        before = self._seen.get(request_id, (0.0, 0.0))
        expected, total = before[0] + expected, before[1] + accepted
        decay = 0.5 if expected > _REQUEST_MEMORY else 1.0
        self._seen[request_id] = (expected * decay, total * decay)

    def forget(self, request_id: int) -> None:
        """Drop what is known about a request that has ended."""
        self._seen.pop(request_id, None)
