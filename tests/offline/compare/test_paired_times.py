"""The ratio of paired times, and what its interval allows to be said."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.offline.compare.paired_times import PairedTimes, SpeedupVerdict


def drawn(rng: np.random.Generator, speedup: float, pairs: int, noise: float) -> PairedTimes:
    """Pairs whose pace drifts by a factor of three, each side with noise of its own."""
    times = PairedTimes()
    for pace in np.geomspace(1.0, 3.0, pairs):
        plain, speculative = pace * rng.lognormal(0.0, noise, 2)
        times.add(plain, speculative / speedup)
    return times


@pytest.mark.parametrize(
    ("speedup", "verdict"),
    [(1.4, SpeedupVerdict.PAYS), (0.8, SpeedupVerdict.COSTS), (1.0, SpeedupVerdict.UNCLEAR)],
)
def test_verdicts(speedup: float, verdict: SpeedupVerdict) -> None:
    times = drawn(np.random.default_rng(1), speedup, 24, 0.05)
    assert times.verdict is verdict
    assert times.speedup == pytest.approx(speedup, rel=0.06)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    intervals = [drawn(rng, 1.3, 20, 0.1).interval() for _ in range(300)]
    covered = sum(low <= 1.3 <= high for low, high in intervals)
    assert 260 <= covered <= 298  # of 300; the percentile bootstrap is a little narrow


def test_the_speedup_is_of_all_time_and_not_a_mean_of_ratios() -> None:
    times = PairedTimes([9.0, 1.0], [6.0, 2.0])
    assert times.speedup == 10 / 8


def test_too_few_pairs_say_nothing() -> None:
    times = PairedTimes([2.0] * 5, [1.0] * 5)
    assert times.verdict is SpeedupVerdict.UNCLEAR
    assert "too few" in str(times)
    times.add(2.0, 1.0)
    assert times.verdict is SpeedupVerdict.PAYS
    assert str(times) == "2.00x \N{PLUS-MINUS SIGN} 0.00"
    assert PairedTimes().speedup == 1.0
