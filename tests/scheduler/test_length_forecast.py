"""The forecast against plain lists, and what it is worth on a made-up workload."""

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


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_shrunk_mean_residual(seed: int):
    rng = np.random.default_rng(seed)
    forecast, plain = LengthForecast(), PlainForecast()
    num_groups = int(rng.integers(1, 60))
    scales = rng.integers(1, 400, num_groups)
    for _ in range(1500):
        group = int(rng.integers(num_groups))
        length = int(rng.integers(1, scales[group] + 2))
        if rng.random() < 0.6:
            forecast.observe(group, length)
            plain.observe(group, length)
        asked = int(rng.integers(num_groups + 3)), int(rng.integers(450)), int(rng.integers(1, 500))
        assert forecast.remaining(*asked) == pytest.approx(plain.remaining(*asked), rel=1e-12)
        if rng.random() < 0.01:
            learned = json.loads(json.dumps(forecast.learned()))
            forecast = LengthForecast()
            forecast.restore(learned)


def test_where_nothing_was_observed_it_is_the_room():
    forecast = LengthForecast()
    assert forecast.is_empty
    assert forecast.remaining(group=1, generated=7, room=93) == 93


def test_an_unknown_group_counts_as_the_mean_of_all():
    forecast = LengthForecast()
    forecast.observe(1, 10)
    forecast.observe(2, 30)
    assert not forecast.is_empty
    assert forecast.remaining(3, 0, 1000) == 20
    assert forecast.remaining(2, 0, 1000) == pytest.approx((30 + 2 * 20) / 3)


def test_who_has_outlived_everything_is_half_way():
    forecast = LengthForecast()
    forecast.observe(1, 50)
    assert forecast.remaining(1, 50, 1000) == 50
    assert forecast.remaining(1, 400, 1000) == 400
    assert forecast.remaining(1, 400, 100) == 100
    assert forecast.remaining(1, 49, 1000) == 1


def test_a_group_remembers_what_all_have_forgotten():
    forecast = LengthForecast()
    forecast.observe(7, 1000)
    for _ in range(RECENT_LENGTHS):
        forecast.observe(8, 10)
    assert forecast.remaining(7, 600, 10_000) == 400
    assert forecast.remaining(8, 600, 10_000) == 600, "outlived all that is recent"


def test_newer_lengths_push_out_older_ones():
    forecast = LengthForecast()
    for length in [500] * RECENT_LENGTHS + [20] * RECENT_LENGTHS:
        forecast.observe(1, length)
    assert forecast.remaining(1, 0, 10_000) == 20


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
    forecast = LengthForecast()
    for _ in range(3000):
        forecast.observe(int(rng.integers(-(2**63), 2**63)) % 40, int(rng.integers(1, 99)))
    restored = LengthForecast()
    restored.observe(5, 5)
    restored.restore(json.loads(json.dumps(forecast.learned())))
    assert list(restored.learned()["groups"]) == list(forecast.learned()["groups"])
    for _ in range(100):
        group, length = int(rng.integers(50)), int(rng.integers(1, 99))
        forecast.observe(group, length)
        restored.observe(group, length)
    assert restored.learned() == forecast.learned()


def test_of_more_than_is_kept_the_latest_is_restored():
    forecast = LengthForecast()
    most = {"recent": list(range(1, 1001)), "groups": {"1": list(range(1, 101))}}
    forecast.restore(most)
    assert forecast.learned() == {
        "recent": list(range(489, 1001)),
        "groups": {"1": [*range(69, 101)]},
    }


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (None, "'recent' and 'groups'"),
        ({"recent": []}, "'recent' and 'groups'"),
        ({"recent": 3, "groups": {}}, "recent must be a list, not 3"),
        ({"recent": [3, -1], "groups": {}}, "recent holds -1"),
        ({"recent": [3, True], "groups": {}}, "recent holds True"),
        ({"recent": [2**31], "groups": {}}, "recent holds 2147483648"),
        ({"recent": [3.5], "groups": {}}, "recent holds 3.5"),
        ({"recent": [3], "groups": [1]}, "'groups' must be an object"),
        ({"recent": [3], "groups": {"x": [1]}}, r"group 'x' must be in \[0, 2\*\*63\)"),
        ({"recent": [3], "groups": {"9" * 5000: [1]}}, "group '9.* must be in"),
        ({"recent": [3], "groups": {"-1": [1]}}, "group '-1' must be in"),
        ({"recent": [3], "groups": {"4": 1}}, r"groups\[4\] must be a list"),
        ({"recent": [3], "groups": {"4": ["5"]}}, r"groups\[4\] holds '5'"),
        ({"recent": [], "groups": {"4": [5]}}, "'recent' is empty"),
    ],
)
def test_something_broken_is_refused_and_changes_nothing(broken, says: str):
    forecast = LengthForecast()
    forecast.observe(1, 10)
    before = forecast.learned()
    with pytest.raises(ValueError, match=says):
        forecast.restore(broken)
    assert forecast.learned() == before


def test_it_ranks_requests_in_flight_by_what_is_to_come():
    """Groups of different lengths, drifting from epoch to epoch; each asked at a random point."""
    rng = np.random.default_rng(0)
    num_groups, samples, room = 60, 8, 4096
    means = np.exp(rng.normal(5, 0.8, num_groups))
    forecast = LengthForecast()
    concordance = []
    for _ in range(4):
        means *= np.exp(rng.normal(0.05, 0.1, num_groups))
        lengths = np.exp(rng.normal(0, 0.35, (num_groups, samples))) * means[:, None]
        lengths = lengths.astype(int).clip(1, room)
        generated = (lengths * rng.random(lengths.shape)).astype(int)
        guesses = np.array(
            [
                [forecast.remaining(group, int(done), room - int(done)) for done in row]
                for group, row in enumerate(generated)
            ]
        )
        rest = (lengths - generated).ravel()
        pairs = rng.integers(rest.size, size=(4000, 2))
        pairs = pairs[rest[pairs[:, 0]] > rest[pairs[:, 1]]]
        more, less = guesses.ravel()[pairs].T
        concordance.append(float(np.mean((more > less) + 0.5 * (more == less))))
        for group, row in enumerate(lengths.tolist()):
            for length in row:
                forecast.observe(group, length)
    assert concordance[0] < 0.55, "nothing is known: the room that is left says nothing"
    assert min(concordance[1:]) > 0.65
