"""The time that drafts save, estimated from the plain steps between: unbiased, with an honest
error."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.engine.metrics import MetricsRecorder, StepMetrics
from rollout.engine.speedup import PlainPace, Saving
from rollout.types import Batch, EntryResult, StepForecast, StepResult, StepTimes


def book(
    recorder: MetricsRecorder, took_ms: float, *, accepted: int = 0, proposed: int = 0
) -> None:
    """A step of one request; plain decoding is predicted to take 10 ms, drafting 2 more."""
    drafted = 4 if accepted else 0
    forecast = StepForecast(
        predicted_ms=10.0 + 2.0 * (proposed > 0),
        plain_ms=10.0,
        decode_ms=10.0,
        predicted_gain_ms=0.0,
    )
    entry = EntryResult(
        token_ids=[1] * (1 + accepted), logprobs=[0.0] * (1 + accepted),
        path=list(range(1, accepted + 1)), num_drafted=drafted,
    )  # fmt: skip
    result = StepResult(
        entries=[entry], weight_version=0, num_query_tokens=1 + drafted, num_proposed=proposed,
        expected_accepted=0.0, forecast=forecast, times=StepTimes(forward=took_ms, total=took_ms),
    )  # fmt: skip
    batch = Batch(step=1, entries=[])
    batch.num_run_tokens = 1
    recorder.record(batch, result, StepMetrics(), [])


def decoded(rng: np.random.Generator, *, saves: bool) -> tuple[float, MetricsRecorder]:
    """2,000 steps on a machine that slows down by half midway; the true saving, in seconds.

    Drafts halve the time of a token, or save nothing at all.
    """
    recorder, true_ms = MetricsRecorder(kv_slots=8), 0.0
    for step in range(2000):
        pace = 1.3 * (1.0 if step < 1000 else 1.5)
        noise = float(rng.lognormal(0.0, 0.08))
        if step % 64 == 0 or step in (4, 8, 16, 32):
            book(recorder, 10.0 * pace * noise)
            continue
        took_ms = (10.0 if saves else 20.0) * pace * noise
        true_ms += 20.0 * pace - took_ms
        book(recorder, took_ms, accepted=1, proposed=4)
    return true_ms / 1e3, recorder


@pytest.mark.parametrize("saves", [True, False])
def test_the_saving_is_within_its_error_though_the_machine_slows_down(saves):
    rng = np.random.default_rng(5)
    runs = [decoded(rng, saves=saves) for _ in range(30)]
    misses = [abs(true - run.total.saved_seconds) for true, run in runs]
    within = sum(
        miss <= run.total.saved_error_seconds for miss, (_, run) in zip(misses, runs, strict=True)
    )
    assert within >= 25
    assert np.mean([run.total.saved_error_seconds for _, run in runs]) < 0.15 * 25


def test_steps_that_verify_no_draft_lose_no_more_than_proposing_takes():
    for took_ms, proposed, gain_ms in ((1000.0, 0, 0.0), (12.0, 4, -200.0)):
        recorder = MetricsRecorder(kv_slots=8)
        for _ in range(100):
            book(recorder, took_ms, proposed=proposed)
        assert recorder.total.gain_ms == pytest.approx(gain_ms)


def test_without_plain_steps_the_error_is_a_tenth():
    pace = PlainPace()
    assert pace.record_saved(600.0) + pace.record_saved(400.0) == 1000.0
    assert pace.variance_ms2 == pytest.approx(100.0**2)
    assert pace.observe(15.0, 10.0) == pytest.approx(500.0)  # they took half as long again


def test_a_stall_is_booked_to_nobody():
    recorder = MetricsRecorder(kv_slots=8)
    for number in range(300):
        stall_ms = 1000.0 if number % 50 == 7 else 0.0
        if number % 8:
            book(recorder, 20.0 + stall_ms, accepted=1, proposed=4)
        else:
            book(recorder, 10.0)
    assert abs(recorder.total.gain_ms) < 0.05 * 300 * 20


def test_a_saving_within_its_error_is_no_difference():
    clear = Saving(seconds=2.0, error_seconds=0.5, run_seconds=10.0)
    assert (clear.is_significant, clear.speedup, clear.speedup_error) == (True, 1.2, 0.05)
    assert not Saving(0.5, 0.5, 10.0).is_significant
    assert not Saving(-0.5, 0.5, 10.0).is_significant
    assert Saving(0.0, 0.0, 0.0).speedup == 1.0
