"""The estimate of the time a job takes yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engine.metrics import EngineMetrics
from rollout.offline.progress import TimeLeft
from rollout.types import FinishReason
from tests.helpers.requests import make_request

LIMIT = 10_000


def running(generated: int, **params: Any):
    return make_request([1] * (3 + generated), prompt_len=3, max_new_tokens=LIMIT, **params)


def after(lengths: list[int]) -> TimeLeft:
    left = TimeLeft()
    for length in lengths:
        rollout: Any = SimpleNamespace(finish_reason=FinishReason.STOP, token_ids=[1] * length)
        left.observe(running(length), rollout)
    return left


METRICS = EngineMetrics(generated_tokens=1000, target_forwards=1000, steps=250)  # four at a time
SECONDS = 10.0


def test_nothing_is_said_before_the_first_rollouts() -> None:
    assert after([]).seconds([running(50)], 8, METRICS, SECONDS) is None
    assert after([5, 5]).seconds([running(50)], 6, METRICS, SECONDS) is None
    aborted: Any = SimpleNamespace(finish_reason=FinishReason.ABORT, token_ids=[1])
    left = after([5, 5])
    left.observe(running(1), aborted)
    assert left.seconds([running(50)], 6, METRICS, SECONDS) is None


def test_rollouts_of_one_length_take_their_tokens_over_the_throughput() -> None:
    left = after([100] * 400)
    waiting = [running(0)] * 3
    eight_more = left.seconds([*[running(60)] * 4, *waiting], 12, METRICS, SECONDS)
    assert eight_more == pytest.approx((4 * 40 + 8 * 100) / 100, rel=0.02)


def test_long_ones_that_run_make_those_to_come_longer() -> None:
    """Counts alone would say: four ended in ten seconds, so sixteen end in forty."""
    left = after([10, 10, 10, 10])
    short = left.seconds([running(5)] * 4, 16, METRICS, SECONDS)
    long = left.seconds([running(500)] * 4, 16, METRICS, SECONDS)
    assert short is not None
    assert long is not None
    assert short < 3
    assert long == pytest.approx((4 * 500 + 12 * (40 + 4 * 500) / 4) / 100)


def test_none_is_longer_than_it_may_be() -> None:
    left = after([10, 10, 10])
    few = [make_request([1] * 63, prompt_len=3, max_new_tokens=64) for _ in range(8)]
    assert left.seconds(few, 10, METRICS, SECONDS) == pytest.approx((8 * 4 + 2 * 64) / 100)


def test_the_last_ones_take_the_steps_of_the_longest() -> None:
    left = after([100] * 3 + [1100])
    shortest = left.seconds([running(99), running(1)], 2, METRICS, SECONDS)
    (last,) = [left.seconds([running(100)], 1, METRICS, SECONDS)]
    assert last == pytest.approx(1000 * 10 / 250)  # not 1000 tokens at 100 tokens/s
    assert shortest is not None
