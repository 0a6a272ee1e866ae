"""The time that drafts save, estimated from the plain steps between: unbiased, with an honest
error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollout.engine.metrics import MetricsRecorder, StepMetrics
from rollout.engine.speedup import HALF_INTERVAL, PlainPace, Saving
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


def wandering_pace(rng: np.random.Generator, steps: int) -> np.ndarray:
    """A machine's pace at each step: it drifts, jumps or swings, with autocorrelated noise."""
    at = np.arange(steps)
    drifts = (
        np.exp(rng.normal(0.0, 0.3) * at / steps),
        np.where(at < rng.integers(steps), 1.0, 1.5),
        np.exp(0.2 * np.sin(2 * np.pi * (at / rng.uniform(20, steps + 20) + rng.random()))),
    )
    kept, noise = rng.choice([0.5, 0.8, 0.95, 0.99]), rng.normal(0.0, 1.0, steps)
    noise[1:] *= np.sqrt(1 - kept**2)
    for step in range(1, steps):
        noise[step] += kept * noise[step - 1]
    return 1.3 * drifts[rng.integers(3)] * np.exp(rng.uniform(0.02, 0.12) * noise)


def decoded(rng: np.random.Generator, steps: int, speedup: float | None = None) -> Saving:
    """A job whose batch gets narrow, measured; less the true saving unless ``speedup`` is given.

    The learned curve is wrong by up to a third at first, by width, and for drafting steps alone.
    """
    at = np.arange(steps)
    pace = wandering_pace(rng, steps)
    disturbed = pace * np.exp(rng.normal(0.0, rng.uniform(0.01, 0.1), steps))
    stalls_ms = np.where(rng.random(steps) < 0.01, rng.exponential(200.0, steps), 0.0)
    widths = np.maximum(1, rng.choice([1, 4, 32]) * np.minimum(1.0, 2 - 2 * at / steps))
    true_ms = 10.0 + 0.5 * widths
    predicted_ms = true_ms * np.exp(rng.normal(0.0, 0.03) * np.log2(widths))
    predicted_ms *= np.exp(rng.normal(0.0, 0.3) * np.exp(-at / 10))
    drafting_error = np.exp(rng.normal(0.0, 0.02))
    costs = 1.6 / (speedup or rng.uniform(0.9, 1.5))  # of a drafting step, for 1.6 tokens
    shut = rng.integers(steps) if rng.random() < 0.4 else steps  # the gate, for a while
    estimate, turns = PlainPace(), 0
    saved_ms = run_ms = 0.0
    for step in range(steps):
        is_plain = shut <= step < shut + 100
        if not is_plain:
            turns += 1
            is_plain = turns % 64 == 0 or turns in (4, 8, 16, 32)
        predicted, took = predicted_ms[step], true_ms[step] * disturbed[step]
        if is_plain:
            took += stalls_ms[step]
            saved_ms += estimate.observe(estimate.bounded(took, predicted), predicted)
        else:
            tokens = 1 + rng.binomial(10, 0.6) / 10
            took = took * costs + stalls_ms[step]
            saved_ms += estimate.record_saved(predicted * tokens * drafting_error)
            saved_ms -= estimate.bounded(took, predicted * costs)
            if speedup is None:
                saved_ms -= pace[step] * true_ms[step] * (tokens - costs)
        run_ms += took
    error_ms = HALF_INTERVAL * estimate.variance_ms2**0.5
    return Saving(saved_ms / 1e3, error_ms / 1e3, run_ms / 1e3)


@pytest.mark.parametrize(("fewest", "most"), [(12, 100), (100, 2000)])
def test_the_interval_covers_the_true_saving_though_the_machine_wanders(fewest, most):
    rng = np.random.default_rng(5)
    lengths = np.geomspace(fewest, most, 200).astype(int)
    misses = [decoded(rng, steps) for steps in lengths]
    covered = np.mean([abs(each.seconds) <= each.error_seconds for each in misses])
    assert covered >= 0.93


@pytest.mark.parametrize(
    ("speedup", "steps", "least", "most"),
    [(1.0, 12, 0.0, 0.15), (1.3, 12, 0.0, 0.3), (1.0, 1500, 0.0, 0.1), (1.3, 1500, 0.9, 1.0)],
)
def test_a_long_run_claims_a_speedup_and_a_short_one_rarely(speedup, steps, least, most):
    rng = np.random.default_rng(6)
    claimed = ["over" in str(decoded(rng, steps, speedup)) for _ in range(60)]
    assert least <= np.mean(claimed) <= most


def test_steps_that_verify_no_draft_lose_no_more_than_proposing_takes():
    for took_ms, proposed, gain_ms in ((1000.0, 0, 0.0), (12.0, 4, -200.0)):
        recorder = MetricsRecorder(kv_slots=8)
        for _ in range(100):
            book(recorder, took_ms, proposed=proposed)
        assert recorder.total.gain_ms == pytest.approx(gain_ms)


def test_the_first_plain_step_corrects_what_was_saved_before_it():
    pace = PlainPace()
    assert pace.record_saved(600.0) + pace.record_saved(400.0) == 1000.0
    assert pace.observe(15.0, 10.0) == pytest.approx(500.0)  # they took half as long again


@pytest.mark.parametrize(
    ("plain", "drafting", "is_measured"), [(5, 5, True), (4, 9, False), (9, 4, False)]
)
def test_nothing_is_claimed_of_too_few_steps(plain, drafting, is_measured):
    recorder = MetricsRecorder(kv_slots=8)
    for accepted in [0] * plain + [1] * drafting:
        book(recorder, 10.0, accepted=accepted, proposed=4 * accepted)
    saving = recorder.total.saving(run_seconds=1.0, replicas=1)
    assert saving.is_measured is is_measured
    assert ("\N{PLUS-MINUS SIGN}" in str(saving)) is is_measured
    assert not saving.is_significant or is_measured


def test_a_stall_is_booked_to_nobody():
    recorder = MetricsRecorder(kv_slots=8)
    for number in range(300):
        stall_ms = 1000.0 if number % 50 == 7 else 0.0
        if number % 8:
            book(recorder, 20.0 + stall_ms, accepted=1, proposed=4)
        else:
            book(recorder, 10.0)
    assert abs(recorder.total.gain_ms) < 0.05 * 300 * 20


@pytest.mark.parametrize(
    ("seconds", "error", "says"),
    [
        (2.0, 0.5, "1.20x ± 0.05 over plain decoding (+2.0 s ± 0.5)"),
        (-2.0, 0.5, "0.80x ± 0.05 over plain decoding (-2.0 s ± 0.5)"),
        (0.6, 2.1, "inconclusive: 1.06x ± 0.21 against plain decoding"),
        (-0.02, 0.1, "no measurable speedup (1.00x ± 0.01)"),
        (0.08, 0.0, "no measurable speedup (1.01x ± 0.01)"),
        (
            0.5,
            math.inf,
            "speedup not measured: too few steps (it takes 5 plain and 5 drafting ones)",
        ),
    ],
)
def test_a_saving_within_its_error_is_not_claimed(seconds, error, says):
    assert str(Saving(seconds, error, run_seconds=10.0)) == says
