"""Milliseconds that one more token of each running request saves, where nobody waits to replace it.

Then a batch ends with its last request. A token saves its request's row in the step that would
have been the request's last, and the whole of that step if no other request runs in it. Over all
requests that adds up to the time of one step, minus a loss for ties: a step in which several
requests end is saved only if each of them ends sooner.

Legend: B running requests, T points ahead of now, in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.types import Remaining

_COUNTED = 0.6
"""The share of a rollout's accepted tokens that counts in the worth of one: see `last_alone`."""

_AROUND = np.array(
    [-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 4.0]
)
"""Offsets, in standard deviations, from where a request that runs to its limit is expected to end.
They are densest where the last of several ends."""

_MAX_LIMITS = 10  # limits that get such points
_BEFORE = np.linspace(0.0, 1.0, 24)  # points for ends before a limit
_BEYOND = 4.0  # points reach this many mean lengths past the longest expected request
_LEAST = 1e-300  # its logarithm is finite

_FIRST_RATE = 0.5  # draft tokens accepted per request and step, before any was seen
_INERTIA = 8.0  # steps that the first rate is worth
_MEMORY = 64.0  # steps
_FADE = 0.99  # a step that verified none: see `AcceptRate`
_DECAY = 0.5  # at a change of policy


def token_ms(
    plain_ms: float, alone_ms: float, width: int, last_alone_B: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The worth of one more token of each request: float64 [B].

    Args:
        plain_ms: a plain step of ``width`` requests.
        alone_ms: a plain step of one.
        last_alone_B: of `last_alone`.
    """
    row_ms = (plain_ms - alone_ms) / max(1, width - 1)
    return row_ms + (alone_ms - row_ms) * last_alone_B


def last_alone(remaining_B: Sequence[Remaining], accept_rate: float) -> NDArray[np.float64]:
    """The probability that no other request runs in each request's last step: float64 [B].

    A request ends at each token with the same probability, which its expected length gives, and
    certainly at its limit. Accepted drafts bring it there in fewer steps; their number has a
    Poisson distribution. Requests that share a limit save steps only together, so the first
    accepted tokens are worth little and the last ones much. The result stands for the mean worth
    over all numbers of accepted tokens: it is the worth when `_COUNTED` of them are accepted.

    Args:
        accept_rate: draft tokens accepted per request and step.
    """
    if len(remaining_B) == 1:
        return np.ones(1)
    expected_B, limits_B = np.array(remaining_B, dtype=np.float64).T
    drafted_B = limits_B * (_COUNTED * accept_rate / (1.0 + accept_rate))

    def alive(points_T: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probability that a request runs on behind each point."""
        spared_BT = np.floor(limits_B[:, None] - points_T)
        within_BT = _poisson_cdf(spared_BT, drafted_B[:, None])
        return within_BT * np.exp(-np.maximum(points_T, 0.0) / expected_B[:, None])

    points_T = _points(expected_B, limits_B, drafted_B)
    alive_BT = alive(points_T)
    before_T = np.maximum((points_T[1:] + points_T[:-1] - 1.0) / 2, points_T[:-1])
    log_BT = np.log(np.maximum(1.0 - alive(before_T), _LEAST))
    others_BT = np.exp(log_BT.sum(axis=0) - log_BT)
    return np.clip(((alive_BT[:, :-1] - alive_BT[:, 1:]) * others_BT).sum(axis=1), 0.0, 1.0)


def _points(
    expected_B: NDArray[np.float64], limits_B: NDArray[np.float64], drafted_B: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Ascending points half-way between tokens, dense where ends are likely. Every possible end
    lies between two of them."""
    limits, first = np.unique(limits_B, return_index=True)
    if len(limits) > _MAX_LIMITS:
        some = np.linspace(0, len(limits) - 1, _MAX_LIMITS).astype(np.intp)
        limits, first = limits[some], first[some]
    drafted = drafted_B[first, None]
    around = limits[:, None] - drafted + np.sqrt(drafted + 1.0) * _AROUND
    longest = float(expected_B.max()) * (math.log(len(expected_B)) + _BEYOND)
    before = min(float(limits[-1]), longest) * _BEFORE
    points = np.concatenate([around.ravel(), limits - 1.0, limits, before])
    return np.unique(np.clip(np.floor(points), -1.0, limits[-1]) + 0.5)


def _poisson_cdf(counts: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probability of at most so many events; approximately (Wilson and Hilferty 1931)."""
    shape = np.maximum(counts + 1.0, 1.0)
    normal = 3.0 * np.sqrt(shape) * (1.0 - 1.0 / (9.0 * shape) - np.cbrt(mean / shape))
    exponent = normal * (
        1.5976 + 0.07056 * normal * normal
    )  # of the normal distribution: Page 1977
    return np.where(counts < 0, 0.0, 1.0 / (1.0 + np.exp(np.clip(-exponent, -99.0, 99.0))))


class AcceptRate:
    """Draft tokens accepted per request, of steps that verified some.

    Steps that verify none let it return to the first guess: where tokens seem to be worth nothing
    because few were accepted, none would ever be tried again.
    """

    def __init__(self) -> None:
        self._accepted = self._steps = 0.0

    @property
    def value(self) -> float:
        """Tokens per request and step."""
        return (self._accepted + _FIRST_RATE * _INERTIA) / (self._steps + _INERTIA)

    def observe(self, accepted: float) -> None:
        """Learn from a step that verified drafts: accepted tokens per request."""
        self._accepted += accepted
        self._steps += 1.0
        if self._steps > _MEMORY:
            self.fade(0.5)

    def fade(self, share: float = _FADE) -> None:
        """Let the rate fade by a step that verified no draft."""
        self._accepted *= share
        self._steps *= share

    def decay(self) -> None:
        """Let what was learned count for less, as the policy has changed."""
        self.fade(_DECAY)
