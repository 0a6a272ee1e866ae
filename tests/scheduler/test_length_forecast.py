"""The forecast against plain lists."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollout.scheduler.length_forecast import (
    GROUP_LENGTHS,
    MAX_GROUPS,
    RECENT_LENGTHS,
    SHRINKAGE,
    LengthForecast,
)


class PlainForecast:
    """The forecast that `LengthForecast` documents, computed from the whole history each time."""

    def __init__(self) -> None:
        self.history: list[tuple[int, int]] = []

    def observe(self, group: int, length: int) -> None:
        self.history.append((group, length))

    def remaining(self, group: int, generated: int, room: int) -> float:
        if not self.history:
            return room
        recent = [length for _, length in self.history[-RECENT_LENGTHS:]]
        own = [length for g, length in self.history if g == group][-GROUP_LENGTHS:]
        beyond = [length - generated for length in recent if length > generated]
        own_beyond = [length - generated for length in own if length > generated]
        if beyond:
            weighed = own_beyond + [sum(beyond) / len(beyond)] * SHRINKAGE
            expected = sum(weighed) / len(weighed)
        elif own_beyond:
            expected = sum(own_beyond) / len(own_beyond)
        else:
            expected = generated
        return max(1, min(room, expected))


def test_it_is_the_shrunk_mean_residual():
    for seed in range(8):
        rng = np.random.default_rng(seed)
        forecast, plain = LengthForecast(), PlainForecast()
        num_groups = int(rng.integers(1, 60))
        scales = rng.integers(1, 400, num_groups)
        for _ in range(1500):
            group = int(rng.integers(num_groups))
            length = int(rng.integers(1, scales[group] + 2))
            asked = int(rng.integers(num_groups + 3)), int(rng.integers(450))
            asked = (*asked, int(rng.integers(1, 500)))
            assert forecast.is_empty == (not plain.history)
            expected = pytest.approx(plain.remaining(*asked), rel=1e-12)
            assert forecast.remaining(*asked) == expected, seed
            if rng.random() < 0.6:
                forecast.observe(group, length)
                plain.observe(group, length)
            if rng.random() < 0.01:
                learned = json.loads(json.dumps(forecast.learned()))
                forecast = LengthForecast()
                forecast.restore(learned)


def test_groups_observed_least_recently_are_forgotten_first():
    forecast = LengthForecast()
    for group in range(MAX_GROUPS):
        forecast.observe(group, 10)
    forecast.observe(0, 10)
    forecast.observe(MAX_GROUPS, 10)
    groups = forecast.learned()["groups"]
    assert len(groups) == len(forecast) == MAX_GROUPS
    assert "1" not in groups
    assert {"0", "2", str(MAX_GROUPS)} <= groups.keys()


def test_restored_it_forgets_in_the_same_order():
    rng = np.random.default_rng(3)
    forecast, restored = LengthForecast(), LengthForecast()
    for _ in range(3000):
        forecast.observe(int(rng.integers(40)), int(rng.integers(1, 99)))
    restored.observe(5, 5)
    restored.restore(json.loads(json.dumps(forecast.learned())))
    assert list(restored.learned()["groups"]) == list(forecast.learned()["groups"])
    for _ in range(100):
        group, length = int(rng.integers(50)), int(rng.integers(1, 99))
        forecast.observe(group, length)
        restored.observe(group, length)
    assert restored.learned() == forecast.learned()
    restored.restore({"recent": list(range(1, 1001)), "groups": {"1": list(range(1, 101))}})
    latest = {"recent": list(range(489, 1001)), "groups": {"1": [*range(69, 101)]}}
    assert restored.learned() == latest


def test_something_broken_is_refused_and_changes_nothing():
    forecast = LengthForecast()
    forecast.observe(1, 10)
    before = forecast.learned()
    for broken, says in (
        (None, "'recent' and 'groups'"),
        ({"recent": 3, "groups": {}}, "recent must be a list, not 3"),
        ({"recent": [3, 0], "groups": {}}, "recent holds 0"),
        ({"recent": [3], "groups": [1]}, "'groups' must be an object"),
        ({"recent": [3], "groups": {"x": [1]}}, r"group 'x' must be in \[0, 2\*\*63\)"),
        ({"recent": [3], "groups": {"-1": [1]}}, "group '-1' must be in"),
        ({"recent": [3], "groups": {"4": ["5"]}}, r"groups\[4\] holds '5'"),
        ({"recent": [], "groups": {"4": [5]}}, "'recent' is empty"),
    ):
        with pytest.raises(ValueError, match=says):
            forecast.restore(broken)
        assert forecast.learned() == before, says
