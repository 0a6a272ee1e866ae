"""How often what was estimated comes true, by how likely it was said to be.

Legend: R rows, C candidates, X contexts that learn apart, P knots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KNOTS_P = np.array([0.01, 0.03, 0.08, 0.18, 0.32, 0.5, 0.68, 0.82, 0.92, 0.98])
_INERTIA = 4.0  # expected cases that the estimates' own word is worth
_MEMORY = 150.0  # expected cases, of each knot


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
        keep_XP = np.minimum(1.0, _MEMORY / np.maximum(self._expected_XP, _MEMORY))
        self._expected_XP *= keep_XP
        self._true_XP *= keep_XP


def _between(estimates_RC: NDArray) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The knot below each estimate but the last, and how far it is on the way to the next."""
    place_RC = np.interp(estimates_RC, KNOTS_P, np.arange(len(KNOTS_P)))
    below_RC = np.minimum(place_RC.astype(np.intp), len(KNOTS_P) - 2)
    return below_RC, place_RC - below_RC
