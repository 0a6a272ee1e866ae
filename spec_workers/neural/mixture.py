"""The weights of a mixture, and how reliable its estimates are, learned from accepted tokens.

Legend: R rows, C candidates, K components, X contexts that learn apart, P knots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_DEPTH_OF = np.array([0, 1, 2, 2, 3])  # levels below the root to buckets: 0, 1, 2-3, 4 and more
CONFIDENT = (0.5, 0.9)  # where the draft's highest probability changes its bucket
CONTEXTS = 2 * 4 * 3

_FIRST_GUESS_K = np.array([5.0, 1.0, 0.6, 0.4, 0.2, 0.8])
"""Observations: at first the draft's own probabilities are believed more than the noise."""

_MEMORY = 400.0  # observations
_LEAST = 1e-6
_MIN_COUNT = 0.01
"""Each component is left as much: from nothing no observation could bring it back."""


def depth_bucket(depth: int) -> int:
    return int(_DEPTH_OF[min(depth, len(_DEPTH_OF) - 1)])


class LearnedMixture:
    """How much each component is believed; apart for greedy rows, depths, and a draft's confidence.

    Online expectation-maximization (Cappé, Moulines 2009): each observation adds the components'
    responsibilities for it, and older ones fade.
    """

    def __init__(self) -> None:
        self._counts_XK = np.tile(_FIRST_GUESS_K, (CONTEXTS, 1))

    def contexts(
        self,
        is_greedy_R: NDArray[np.bool_],
        depths_R: NDArray[np.int64],
        highest_R: NDArray[np.floating],
    ) -> NDArray[np.int64]:
        """int64 [R] in [0, X). ``depths_R``: levels below the root; ``highest_R``: the draft's
        probability of its likeliest token."""
        depth_R = _DEPTH_OF[np.minimum(depths_R, len(_DEPTH_OF) - 1)]
        return (is_greedy_R * 4 + depth_R) * 3 + np.searchsorted(CONFIDENT, highest_R)

    def weights(self) -> NDArray[np.float32]:
        """Float32 [X, K], of each context one in all."""
        weights_XK = self._counts_XK / self._counts_XK.sum(axis=1, keepdims=True)
        return weights_XK.astype(np.float32)

    def probabilities(
        self, contexts_R: NDArray[np.int64], components_RCK: NDArray[np.floating]
    ) -> NDArray[np.float32]:
        """Float32 [R, C], of tokens with these probabilities under each component."""
        weights_RK1 = self.weights()[contexts_R][:, :, None]
        return np.minimum((components_RCK @ weights_RK1)[:, :, 0], np.float32(1.0))

    def learn(
        self,
        contexts_R: NDArray[np.int64],
        components_RCK: NDArray[np.floating],
        came_true_RC: NDArray[np.bool_],
    ) -> None:
        """``came_true_RC``: at most one candidate of each row; none: it was some other token."""
        chosen_RK = np.where(came_true_RC[:, :, None], components_RCK, 0).sum(axis=1, dtype=float)
        other_RK = 1.0 - components_RCK.sum(axis=1, dtype=float)
        likelihood_RK = np.where(came_true_RC.any(axis=1, keepdims=True), chosen_RK, other_RK)
        share_RK = self._counts_XK[contexts_R] * np.maximum(likelihood_RK, _LEAST)
        share_RK /= share_RK.sum(axis=1, keepdims=True)
        np.add.at(self._counts_XK, contexts_R, share_RK)
        totals_X = self._counts_XK.sum(axis=1, keepdims=True)
        self._counts_XK *= np.minimum(1.0, _MEMORY / totals_X)
        np.maximum(self._counts_XK, _MIN_COUNT, out=self._counts_XK)


KNOTS_P = np.array([0.01, 0.03, 0.08, 0.18, 0.32, 0.5, 0.68, 0.82, 0.92, 0.98])
_INERTIA = 4.0  # expected cases that the estimates' own word is worth
_KNOT_MEMORY = 150.0  # expected cases, of each knot


class Reliability:
    """Scales estimates by what came true of such ones, over what was expected.

    The ratio is learned at knots and interpolated between them: each case tells the two knots
    around its estimate, the nearer one more.
    """

    def __init__(self, contexts: int) -> None:
        self._expected_XP = np.zeros((contexts, len(KNOTS_P)))
        self._true_XP = np.zeros_like(self._expected_XP)

    def ratios(self) -> NDArray[np.float64]:
        """Float64 [X, P]: what came true over what was expected, at each knot."""
        return (self._true_XP + _INERTIA) / (self._expected_XP + _INERTIA)

    def corrected(
        self, contexts_R: NDArray[np.int64], estimates_RC: NDArray[np.floating]
    ) -> NDArray[np.float32]:
        """Float32 [R, C], in [0, 1]."""
        ratios_XP = self.ratios()
        below_RC, share_RC = _between(estimates_RC)
        contexts_R1 = contexts_R[:, None]
        ratio_RC = ratios_XP[contexts_R1, below_RC] * (1 - share_RC)
        ratio_RC += ratios_XP[contexts_R1, below_RC + 1] * share_RC
        return np.minimum(estimates_RC * ratio_RC, 1.0).astype(np.float32)

    def learn(
        self,
        contexts_R: NDArray[np.int64],
        estimates_RC: NDArray[np.floating],
        came_true_RC: NDArray[np.bool_],
    ) -> None:
        """``estimates_RC``: not corrected."""
        below_RC, share_RC = _between(estimates_RC)
        for knots_RC, weights_RC in ((below_RC, 1 - share_RC), (below_RC + 1, share_RC)):
            cells = (np.broadcast_to(contexts_R[:, None], below_RC.shape), knots_RC)
            np.add.at(self._expected_XP, cells, weights_RC * estimates_RC)
            np.add.at(self._true_XP, cells, weights_RC * came_true_RC)
        keep_XP = np.minimum(1.0, _KNOT_MEMORY / np.maximum(self._expected_XP, _KNOT_MEMORY))
        self._expected_XP *= keep_XP
        self._true_XP *= keep_XP


def _between(estimates_RC: NDArray) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The knot below each estimate but the last, and how far it is on the way to the next."""
    place_RC = np.interp(estimates_RC, KNOTS_P, np.arange(len(KNOTS_P)))
    below_RC = np.minimum(place_RC.astype(np.intp), len(KNOTS_P) - 2)
    return below_RC, place_RC - below_RC
