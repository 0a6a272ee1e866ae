"""Levels of trees that bring less than they take are left out, and none is given up for ever."""

from __future__ import annotations

import numpy as np

from spec_workers.neural.arrays import Arrays
from spec_workers.neural.level_pace import LevelPace
from spec_workers.neural.tree_growth import TreeGrowth


def grown(probs_GW: list[list[float]]) -> TreeGrowth:
    """Trees with the children of their roots."""
    probs = np.array(probs_GW, dtype=np.float32)
    count, width = probs.shape
    growth = TreeGrowth(
        Arrays(),
        np.full(count, 8),
        np.full(count, 4),
        np.array([0.01], dtype=np.float32),
        width,
    )
    growth.add(np.zeros((count, 1, width), dtype=np.int64), probs[:, None])
    return growth


def test_a_level_pays_for_what_its_rows_are_worth() -> None:
    pace = LevelPace()
    growth = grown([[0.5, 0.3], [0.2, 0.0]])
    pace.observe(0, growth)  # children had (0.8 + 0.2) of 2 roots
    growth.expand()
    token_ms_G = np.array([10.0, 5.0])
    assert pace.pays(1, growth, token_ms_G), "nothing is known of its time"
    worth = (0.8 * 10.0 + 0.2 * 5.0) * 0.5
    pace.observe_time(2, worth + 0.01)
    assert not pace.pays(1, growth, token_ms_G)
    assert pace.pays(1, growth, 1.01 * token_ms_G)
    pace.observe_time(2, worth - 0.05)
    assert pace.pays(1, growth, token_ms_G)
    assert pace.pays(1, grown([[0.1, 0.1]] * 3), np.full(3, 1e-9)), "of as many trees none was seen"


def test_each_level_has_a_share_of_its_own() -> None:
    pace = LevelPace()
    growth = grown([[0.9, 0.1]])
    pace.observe(0, growth)
    growth.expand()
    growth.add(np.zeros((1, 2, 2), dtype=np.int64), np.full((1, 2, 2), 0.05, dtype=np.float32))
    pace.observe(1, growth)
    pace.observe_time(1, 1.0)
    growth.expand()
    token_ms_G = np.array([40.0])  # times rows of 0.1 in all
    assert not pace.pays(2, growth, token_ms_G), "as below level 1, a tenth is kept"
    assert pace.pays(0, growth, token_ms_G), "below roots all is kept"


def test_one_slow_level_is_not_believed_and_what_does_not_pay_is_tried_again() -> None:
    pace = LevelPace()
    growth = grown([[1.0, 0.0]])
    pace.observe(0, growth)
    growth.expand()
    pace.observe_time(1, 900.0)  # the first one
    for _ in range(6):
        pace.observe_time(1, 1.0)
    pace.observe_time(1, 900.0)
    assert pace.pays(1, growth, np.array([1.3]))
    asked = 0
    while not pace.pays(1, growth, np.array([1.0])):
        asked += 1
    assert 10 < asked < 200
