"""Whether the next level of growing trees pays, on the CPU, where each level takes its time.

Legend: G trees, F rows of a level, I their children.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from rollout.ops.tree_growth import TreeGrowth
from spec_workers.budget.running_mean import MeanByOctave

_NEW = 0.1  # the weight of the latest share
_TRIED_EVERY = 64
"""One in so many levels that do not pay is run all the same: nothing else would correct its usual
time."""


class LevelPace:
    """Averages of the time that levels took and of the probability that they brought.

    A level brings the probability that one of its nodes is accepted: that of the rows above it,
    times the share of theirs that the children of such rows had.
    """

    def __init__(self) -> None:
        self._times = MeanByOctave()  # of a level, by the number of trees
        self._shares: dict[int, float] = {}  # by level of the rows, 0 for roots
        self._refused = 0

    def pays(self, level: int, growth: TreeGrowth, token_ms_G: NDArray[np.float64]) -> bool:
        """Whether to run a level, 1 for children of the roots, whose rows are the newest.

        ``token_ms_G``: that an accepted token of each tree saves.
        """
        share = self._shares.get(level, self._shares.get(level - 1, 1.0))
        worth_ms = float(growth.rows_GF.sum(dim=1).numpy() @ token_ms_G) * share
        if worth_ms >= self._times.milliseconds(len(token_ms_G)):
            return True
        self._refused += 1
        return self._refused % _TRIED_EVERY == 0

    def observe(self, level: int, growth: TreeGrowth) -> None:
        """Learn from the children that a level's rows got, 0 for roots."""
        rows, children = float(growth.rows_GF.sum()), float(growth.children_GI.clamp(min=0).sum())
        if rows > 0.0:
            share = min(1.0, children / rows)
            usual = self._shares.get(level, share)
            self._shares[level] = usual + _NEW * (share - usual)

    @contextmanager
    def timed(self, trees: int, is_warm: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Time what runs a level. ``is_warm``: afterwards, whether the time is steady-state."""
        began = time.perf_counter()
        yield
        if is_warm():
            self._times.observe(trees, (time.perf_counter() - began) * 1e3)
