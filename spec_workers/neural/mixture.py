"""The weights of a mixture, and how reliable its estimates are, learned from accepted tokens.

What is learned is read as small tables, also on a device: `LearnedMixture.weights`,
`Reliability.tables`.

Legend: R rows, C candidates, K components, X contexts that learn apart, P knots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_workers.neural.arrays import Array, Arrays

Tables = Mapping[str, Array]

_DEPTH_OF = np.array([0, 1, 2, 2, 3])  # levels below the root to buckets: 0, 1, 2-3, 4 and more
_CONFIDENT = (0.5, 0.9)  # where the draft's highest probability changes its bucket
CONTEXTS = 2 * 4 * 3  # greedy or not, depths, confidences

_FIRST_GUESS_K = np.array([5.0, 1.0, 0.6, 0.4, 0.2, 0.8])
"""The initial counts of the components: at first the draft's own probabilities are believed more
than the noise."""

_MEMORY = 400.0  # observations
_LEAST = 1e-6  # likelihood: where all components rule a token out, no share is 0 / 0
_MIN_COUNT = 0.01
"""The least count of a component: from zero no observation could bring it back."""


def depth_bucket(depth: Any) -> Any:
    """The bucket of a depth, levels below the root, or those of an array of depths."""
    return _DEPTH_OF[np.minimum(depth, len(_DEPTH_OF) - 1)]


def contexts(is_greedy_R: Array | None, bucket: int | Array, highest_R: Array) -> Array:
    """int64 [R] in [0, X). ``is_greedy_R``: None: none is; ``bucket``: of `depth_bucket`, one for
    all rows or one for each; ``highest_R``: the draft's probability of its likeliest token."""
    context = bucket if is_greedy_R is None else is_greedy_R * 4 + bucket
    context = context * (len(_CONFIDENT) + 1)
    for threshold in _CONFIDENT:
        context = context + (highest_R > threshold)
    return context


class LearnedMixture:
    """Learned weights of the components, kept apart by depth, confidence and greedy sampling.

    Online expectation-maximization (Cappé, Moulines 2009): each observation adds the components'
    responsibilities for it, and older ones fade.
    """

    def __init__(self) -> None:
        self._counts_XK = np.tile(_FIRST_GUESS_K, (CONTEXTS, 1))

    def weights(self) -> NDArray[np.float32]:
        """Float32 [X, K], of each context one in all."""
        weights_XK = self._counts_XK / self._counts_XK.sum(axis=1, keepdims=True)
        return weights_XK.astype(np.float32)

    def learn(
        self,
        contexts_R: NDArray[np.int64],
        components_RCK: NDArray[np.floating],
        came_true_RC: NDArray[np.bool_],
    ) -> None:
        """``components_RCK``: of all but the last. ``came_true_RC``: at most one candidate of each
        row; none: it was some other token, which the last component knew."""
        others_R1 = came_true_RC.any(axis=1, keepdims=True)
        chosen_RK = np.where(came_true_RC[:, :, None], components_RCK, 0).sum(axis=1, dtype=float)
        other_RK = 1.0 - components_RCK.sum(axis=1, dtype=float)
        likelihood_RK = np.where(others_R1, chosen_RK, other_RK)
        likelihood_RK = np.concatenate([likelihood_RK, np.where(others_R1, 0.0, 1.0)], axis=1)
        share_RK = self._counts_XK[contexts_R] * np.maximum(likelihood_RK, _LEAST)
        share_RK /= share_RK.sum(axis=1, keepdims=True)
        np.add.at(self._counts_XK, contexts_R, share_RK)
        totals_X = self._counts_XK.sum(axis=1, keepdims=True)
        self._counts_XK *= np.minimum(1.0, _MEMORY / totals_X)
        np.maximum(self._counts_XK, _MIN_COUNT, out=self._counts_XK)


def mixed(components_RCK: Array, contexts_R: Array, weights_XK: Array) -> Array:
    """Float32 [R, C]: the probabilities of tokens with these under each component but the last,
    which gives them none."""
    weights_R1K = weights_XK[contexts_R][:, None, :-1]
    return (components_RCK * weights_R1K).sum(axis=2).clip(max=1.0)


# Closer together at both ends, where the odds change most.
KNOTS_P = np.array([0.01, 0.03, 0.08, 0.18, 0.32, 0.5, 0.68, 0.82, 0.92, 0.98])
_INERTIA = 4.0  # expected cases that the estimates' own word is worth
_KNOT_MEMORY = 150.0  # expected cases, of each knot


class Reliability:
    """Scales estimates by what came true of such ones, over what was expected.

    The ratio is learned at knots and interpolated between them: each case tells the two knots
    around its estimate, the nearer one more.
    """

    def __init__(self) -> None:
        self._expected_XP = np.zeros((CONTEXTS, len(KNOTS_P)))
        self._true_XP = np.zeros_like(self._expected_XP)

    def tables(self) -> dict[str, NDArray[np.float64]]:
        """The tables that `corrected` reads: how often guesses came true over how often they were
        expected to, ``ratios`` [X, P], at each of the ``knots`` [P]."""
        ratios_XP = (self._true_XP + _INERTIA) / (self._expected_XP + _INERTIA)
        return {"knots": KNOTS_P, "ratios": ratios_XP}

    def learn(
        self,
        contexts_R: NDArray[np.int64],
        estimates_RC: NDArray[np.floating],
        came_true_RC: NDArray[np.bool_],
    ) -> None:
        """``estimates_RC``: not corrected."""
        slot_RC = np.interp(estimates_RC, KNOTS_P, np.arange(len(KNOTS_P)))
        below_RC = np.minimum(slot_RC.astype(np.intp), len(KNOTS_P) - 2)
        share_RC = slot_RC - below_RC
        for knots_RC, weights_RC in ((below_RC, 1 - share_RC), (below_RC + 1, share_RC)):
            cells = (np.broadcast_to(contexts_R[:, None], below_RC.shape), knots_RC)
            np.add.at(self._expected_XP, cells, weights_RC * estimates_RC)
            np.add.at(self._true_XP, cells, weights_RC * came_true_RC)
        decay_XP = np.minimum(1.0, _KNOT_MEMORY / np.maximum(self._expected_XP, _KNOT_MEMORY))
        self._expected_XP *= decay_XP
        self._true_XP *= decay_XP


def corrected(arrays: Arrays, estimates_RC: Array, contexts_R: Array, tables: Tables) -> Array:
    """Float32 [R, C], in [0, 1]: estimates times the ratio learned around each.

    ``tables``: see `Reliability.tables`.
    """
    knots_P, ratios_XP = tables["knots"], tables["ratios"]
    exact_RC = arrays.float64(estimates_RC)
    below_RC = arrays.alike.searchsorted(knots_P[1:-1], exact_RC, side="right")
    begin_RC, contexts_R1 = knots_P[below_RC], contexts_R[:, None]
    share_RC = ((exact_RC - begin_RC) / (knots_P[below_RC + 1] - begin_RC)).clip(0.0, 1.0)
    ratio_RC = ratios_XP[contexts_R1, below_RC] * (1 - share_RC)
    ratio_RC = ratio_RC + ratios_XP[contexts_R1, below_RC + 1] * share_RC
    return arrays.float32((exact_RC * ratio_RC).clip(max=1.0))
