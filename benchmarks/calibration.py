"""How well estimates agree with what came true.

Shape legend: J nodes judged, K bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(kw_only=True, slots=True)
class Bins:
    """Nodes by their estimate; bins with too few nodes are left out."""

    count_K: NDArray[np.int64]
    estimate_K: NDArray[np.float64]  # mean
    rate_K: NDArray[np.float64]  # of acceptance


def deciles(estimates_J: NDArray[np.float32], accepted_J: NDArray[np.bool_]) -> Bins:
    """Ten bins of equal counts; equal estimates may fall into two of them."""
    order_J = np.argsort(estimates_J, kind="stable")
    rank_J = np.empty(len(order_J), np.int64)
    rank_J[order_J] = np.arange(len(order_J))
    return _bins(rank_J * 10 // max(len(rank_J), 1), estimates_J, accepted_J, at_least=1)


def tenths(
    estimates_J: NDArray[np.float32], accepted_J: NDArray[np.bool_], *, at_least: int = 200
) -> Bins:
    """Ten bins of equal width, those of at least so many nodes."""
    bin_J = np.minimum((estimates_J * 10).astype(np.int64), 9)
    return _bins(bin_J, estimates_J, accepted_J, at_least=at_least)


def largest_gap(bins: Bins) -> float:
    """Between mean estimate and acceptance rate, over the bins."""
    return float(np.abs(bins.estimate_K - bins.rate_K).max(initial=0.0))


def _bins(
    bin_J: NDArray[np.int64],
    estimates_J: NDArray[np.float32],
    accepted_J: NDArray[np.bool_],
    *,
    at_least: int,
) -> Bins:
    count_K = np.bincount(bin_J, minlength=10)
    kept_K = count_K >= at_least
    estimate_K = np.bincount(bin_J, estimates_J, minlength=10)[kept_K] / count_K[kept_K]
    rate_K = np.bincount(bin_J, accepted_J, minlength=10)[kept_K] / count_K[kept_K]
    return Bins(count_K=count_K[kept_K], estimate_K=estimate_K, rate_K=rate_K)
