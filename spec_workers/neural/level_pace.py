"""Whether the next level of growing trees pays, on the CPU, where each level takes its time.

Legend: G trees, F rows of a level, I their children.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from spec_workers.neural.tree_growth import TreeGrowth

_NEW = 0.1
"""The weight of what was seen last."""

_FIRST_TIMES = 5
"""Times of which the least is taken: the first ones are slow."""

_MAX_OUTLIER = 3.0
"""The time of one level counts as at most this multiple of the usual time."""

_FORGOTTEN = 0.002
"""The part of a level's time that is forgotten where it does not pay: nothing else would correct
it."""


class LevelPace:
    """Averages of the time that levels took and of the probability that they brought.

    A level brings the probability that one of its nodes is accepted: that of the rows above it,
    times the share of theirs that the children of such rows had.
    """

    def __init__(self) -> None:
        self._milliseconds: dict[int, float] = {}  # of a level, by the number of trees
        self._times: Counter[int] = Counter()  # that were seen, by the number of trees
        self._shares: list[float] = []  # by level of the rows, 0 for roots

    def pays(self, level: int, growth: TreeGrowth, token_ms_G: NDArray[np.float64]) -> bool:
        """Whether to run a level, 1 for children of the roots, whose rows are the newest.

        ``token_ms_G``: that an accepted token of each tree saves.
        """
        rows_GF = growth.rows_GF
        trees = len(rows_GF)
        if trees not in self._milliseconds or not self._shares:
            return True
        share = self._shares[min(level, len(self._shares) - 1)]
        if float(rows_GF.sum(axis=1) @ token_ms_G) * share >= self._milliseconds[trees]:
            return True
        self._milliseconds[trees] *= 1.0 - _FORGOTTEN
        return False

    def observe(self, level: int, growth: TreeGrowth) -> None:
        """Learn from the children that a level's rows got, 0 for roots."""
        rows, children = float(growth.rows_GF.sum()), float(growth.children_GI.clip(min=0).sum())
        if rows <= 0.0:
            return
        share = min(1.0, children / rows)
        if level < len(self._shares):
            self._shares[level] += _NEW * (share - self._shares[level])
        elif level == len(self._shares):
            self._shares.append(share)

    @contextmanager
    def timed(self, trees: int) -> Iterator[None]:
        """Time what runs a level."""
        began = time.perf_counter()
        yield
        self.observe_time(trees, (time.perf_counter() - began) * 1e3)

    def observe_time(self, trees: int, milliseconds: float) -> None:
        """Learn from the time of a level of so many trees."""
        usual = self._milliseconds.setdefault(trees, milliseconds)
        self._times[trees] += 1
        if self._times[trees] <= _FIRST_TIMES:
            self._milliseconds[trees] = min(usual, milliseconds)
        else:
            self._milliseconds[trees] += _NEW * (min(milliseconds, _MAX_OUTLIER * usual) - usual)
