"""A learned curve of milliseconds, against made-up machines."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from spec_workers.budget.cost_curve import CostCurve


def ramp(rows):
    """Memory-bound, then compute-bound."""
    return np.maximum(14.0, 8.0 + 0.8 * np.asarray(rows))


def stairs(rows):
    """A graph per power of two."""
    return 10.0 + 3.0 * np.ceil(np.log2(np.maximum(rows, 4) / 4))


def show(curve, machine, rng, *, steps, max_rows, context=300, outliers=0.0):
    for _ in range(steps):
        rows = int(rng.integers(1, max_rows + 1))
        milliseconds = float(machine(rows)) * rng.lognormal(0, 0.03)
        if rng.random() < outliers:
            milliseconds *= rng.uniform(5, 10)
        curve.observe(rows, context, milliseconds)


def errors(curve, machine, rows, context=300):
    rows = np.asarray(rows)
    return np.abs(curve.milliseconds(rows, context) / machine(rows) - 1)


def check_monotone(curve):
    rows = np.arange(1, 2 * int(curve.rows_H[-1]), 3)
    times = np.array([curve.milliseconds(rows, context) for context in (1, *curve.contexts)])
    assert np.isfinite(times).all()
    assert (times > 0).all()
    assert (np.diff(times, axis=1) >= -1e-9 * times[:, 1:]).all()
    assert (np.diff(times, axis=0) >= -1e-9 * times[1:]).all()


def made():
    return CostCurve(4, 1024, 2048)


@pytest.mark.parametrize(("machine", "mean", "most"), [(ramp, 0.03, 0.08), (stairs, 0.08, 0.25)])
def test_a_machine_is_learned_in_spite_of_hiccups(machine, mean, most):
    curve = made()
    show(curve, machine, np.random.default_rng(1), steps=600, max_rows=64, outliers=0.05)
    error = errors(curve, machine, range(1, 65))
    assert error.mean() < mean
    assert error.max() < most
    check_monotone(curve)


def test_what_was_not_seen_lies_between():
    curve, rng = made(), np.random.default_rng(2)
    for _ in range(200):
        rows = int(rng.choice([4, 16, 128]))
        curve.observe(rows, 300, float(ramp(rows)) * rng.lognormal(0, 0.03))
    assert errors(curve, ramp, [4, 16, 128]).max() < 0.05
    assert errors(curve, ramp, range(4, 129)).max() < 0.35
    longer = curve.milliseconds(np.array([16, 128]), 1000) / ramp([16, 128])
    assert (longer > 1.05).all()  # attention over more: a guess, while nothing was seen of it
    assert (longer < 1.2).all()


def test_a_machine_that_slows_down_is_followed_everywhere():
    curve, rng = made(), np.random.default_rng(3)
    show(curve, ramp, rng, steps=400, max_rows=64)
    show(curve, lambda rows: 1.5 * ramp(rows), rng, steps=40, max_rows=8)
    slower = curve.milliseconds(np.array([4, 8, 32, 64]), 300) / ramp([4, 8, 32, 64])
    assert (slower > 1.35).all()
    assert (slower < 1.6).all()
    assert curve.milliseconds(np.array([8]), 2000)[0] > 1.35 * ramp(8)


def test_a_hiccup_moves_it_little():
    curve, rng = made(), np.random.default_rng(4)
    show(curve, ramp, rng, steps=200, max_rows=32)
    before = curve.milliseconds(np.arange(1, 65), 300)
    curve.observe(16, 300, 1e6)
    curve.observe(16, 300, 1e-3)
    np.testing.assert_allclose(curve.milliseconds(np.arange(1, 65), 300), before, rtol=0.15)


def test_steps_that_went_by_unseen_make_it_less_sure():
    """So that what changed meanwhile is believed at once."""
    skipping, every = made(), made()
    for curve, between in ((skipping, 32), (every, 1)):
        show(curve, ramp, np.random.default_rng(4), steps=200, max_rows=32)
        curve.observe(8, 300, 2 * 14.4, between)
    times = [float(curve.milliseconds(np.array([8]), 300)[0]) for curve in (every, skipping)]
    assert times[0] < times[1] < 2 * 14.4 * 1.05


def test_knots_in_the_wrong_order_become_their_mean_and_the_surer_one_stays():
    curve = made()
    for _ in range(40):
        curve.observe(16, 300, 30.0)
    for _ in range(2):
        curve.observe(23, 300, 20.0)  # two hiccups the other way
    times = curve.milliseconds(np.array([16, 23]), 300)
    assert times[0] <= times[1] + 1e-9
    assert abs(times[0] - 30.0) < abs(times[0] - 20.0)
    check_monotone(curve)


def lognormal(rng):
    return float(rng.lognormal(2, 1))


def extreme(rng):
    return float(rng.choice([1e-3, 1e6]))


@pytest.mark.parametrize(
    ("times", "same_rows", "steps"),
    [
        (lognormal, False, 20_000),
        (extreme, False, 3_000),
        (lambda rng: 1e-3, True, 3_000),
        (lambda rng: 1e6, True, 3_000),
    ],
)
def test_it_stays_sound(times, same_rows, steps):
    curve, rng = made(), np.random.default_rng(5)
    for _ in range(steps):
        rows, context = int(rng.integers(0, 3000)), int(rng.integers(1, 5000))
        curve.observe(*((4, 100) if same_rows else (rows, context)), times(rng))
    covariance_KK = curve._covariance_KK
    assert np.isfinite(covariance_KK).all()
    np.testing.assert_allclose(covariance_KK, covariance_KK.T, atol=1e-9)
    assert np.linalg.eigvalsh(covariance_KK).min() > -1e-9
    check_monotone(curve)
    if same_rows:
        assert curve.milliseconds(np.array([4]), 100)[0] == pytest.approx(times(rng), rel=0.15)
    made().restore(json.loads(json.dumps(curve.learned())))


@pytest.mark.parametrize("milliseconds", [0.0, -1.0, float("nan")])
def test_what_is_no_time_is_ignored(milliseconds):
    curve = made()
    before = curve.learned()
    curve.observe(8, 100, milliseconds)
    assert curve.learned() == before
    assert not curve.is_known


def test_few_rows_cost_as_much_as_the_fewest_unless_they_do_not():
    curve = made()
    few = np.array([0, 1, 2, 3, 4])
    assert np.ptp(curve.milliseconds(few, 300)) == 0
    show(curve, ramp, np.random.default_rng(6), steps=50, max_rows=16)
    np.testing.assert_allclose(curve.milliseconds(few, 300), 14.0, rtol=0.05)
    curve = made()
    show(curve, lambda rows: 8.0 + 2.0 * rows, np.random.default_rng(7), steps=400, max_rows=8)
    assert errors(curve, lambda rows: 8.0 + 2.0 * rows, few[1:]).max() < 0.1


def test_past_the_last_knot_it_is_in_proportion():
    curve = made()
    show(curve, ramp, np.random.default_rng(6), steps=50, max_rows=16)
    last = int(curve.rows_H[-1])
    times = curve.milliseconds(np.array([last, 2 * last]), 300)
    assert times[1] == pytest.approx(2 * times[0])


@pytest.mark.parametrize(
    ("max_context_len", "buckets"), [(2, 1), (256, 1), (257, 2), (512, 2), (1 << 20, 13)]
)
def test_context_buckets(max_context_len, buckets):
    curve = CostCurve(1, 64, max_context_len)
    assert len(curve.contexts) == buckets
    assert curve.contexts[-1] >= max_context_len
    edges = sorted({1, 255, 256, 257, max_context_len - 1, max_context_len, 2 * max_context_len})
    for context in edges:
        bucket = curve._context(context)
        assert bucket == next(
            (k for k, end in enumerate(curve.contexts) if context <= end), buckets - 1
        )
    curve.observe(8, max_context_len, 5.0)
    assert curve.milliseconds(np.array([8]), max_context_len)[0] == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (4, 4), (4, 5), (16, 3), (1, 40_000)])
def test_row_knots(fewest, most):
    curve = CostCurve(fewest, most, 512)
    assert curve.rows_H[0] == 1
    assert curve.rows_H[-1] >= max(fewest, most)
    assert (np.diff(curve.rows_H) > 0).all()
    curve.observe(1, 100, 3.0)
    check_monotone(curve)


def test_restored_it_is_the_same():
    curve = made()
    show(curve, stairs, np.random.default_rng(7), steps=300, max_rows=200)
    other = made()
    other.restore(json.loads(json.dumps(curve.learned())))
    rows = np.arange(1, 3000, 7)
    for context in (1, 300, 5000):
        np.testing.assert_allclose(
            other.milliseconds(rows, context), curve.milliseconds(rows, context), rtol=1e-5
        )
    assert other.is_known
    assert other.learned()["observations"] == curve.learned()["observations"]


@pytest.mark.parametrize("max_rows", [3, 48, 96, 200, 4096])
@pytest.mark.parametrize("max_context_len", [200, 1000, 2048, 9000])
def test_restored_onto_other_knots_it_tells_the_same_times(max_rows, max_context_len):
    curve, rng = CostCurve(4, 150, 2048), np.random.default_rng(10)
    for context in (100, 300, 1000, 2000):
        show(curve, ramp, rng, steps=150, max_rows=100, context=context)
    other = CostCurve(1, max_rows, max_context_len)
    other.restore(json.loads(json.dumps(curve.learned())))
    rows = other.rows_H
    for context in other.contexts:
        like = min(context, curve.contexts[-1])
        np.testing.assert_allclose(
            other.milliseconds(rows, context), curve.milliseconds(rows, like), rtol=1e-4
        )
    assert other.observations_K.sum() == pytest.approx(curve.observations_K.sum(), rel=0.01)
    check_monotone(other)
    show(other, lambda rows: 1.2 * ramp(rows), rng, steps=40, max_rows=max_rows)
    rows = np.arange(1, min(max_rows, 64))
    assert errors(other, lambda rows: 1.2 * ramp(rows), rows).max() < 0.15  # it goes on learning


def test_a_context_below_all_that_were_seen_takes_the_shortest_and_counts_are_carried():
    curve = CostCurve(1, 4, 1024)
    learned = {
        "rows": [1, 3, 16],
        "contexts": [600, 5000],
        "milliseconds": [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]],
        "observations": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
    }
    curve.restore(learned)
    assert curve.contexts == (256, 512, 1024)
    for context in curve.contexts:
        assert curve.milliseconds(np.array([1, 3]), context) == pytest.approx([4.0, 5.0])
    seen = curve.observations_K.reshape(3, -1)
    assert seen.sum() == 21
    assert seen[:2].sum() == 0  # 600 is of the bucket that ends with 1024
    assert seen[2, 0] == 1.0 + 4.0
    assert seen[2, -1] == 3.0 + 6.0


def test_a_guess_restored_is_still_a_guess():
    """Else times far from it would be taken for hiccups."""
    curve = made()
    curve.restore(made().learned())
    assert not curve.is_known
    curve.observe(8, 100, 400.0)
    assert curve.milliseconds(np.array([8]), 100)[0] == pytest.approx(400, rel=0.05)


def with_first(rows, value):
    return [[value, *rows[0][1:]], *rows[1:]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda learned: learned | {"rows": learned["rows"][:-1]},
        lambda learned: learned | {"rows": learned["rows"][::-1]},
        lambda learned: learned | {"rows": [0, *learned["rows"][1:]]},
        lambda learned: learned | {"rows": ["a", *learned["rows"][1:]]},
        lambda learned: learned | {"rows": [[1], *learned["rows"][1:]]},
        lambda learned: learned | {"rows": None},
        lambda learned: learned | {"rows": len(learned["rows"])},
        lambda learned: learned | {"contexts": [256]},
        lambda learned: learned | {"contexts": []},
        lambda learned: learned | {"contexts": [256] * len(learned["contexts"])},
        lambda learned: learned | {"contexts": [256, 512, 1024, float("inf")]},
        lambda learned: {k: v for k, v in learned.items() if k != "milliseconds"},
        lambda learned: {k: v for k, v in learned.items() if k != "observations"},
        lambda learned: learned | {"milliseconds": learned["milliseconds"][1:]},
        lambda learned: learned | {"milliseconds": {}},
        lambda learned: learned | {"milliseconds": "fast"},
        lambda learned: learned | {"milliseconds": [[1.0], [1.0, 2.0]]},
        lambda learned: learned | {"milliseconds": with_first(learned["milliseconds"], 0.0)},
        lambda learned: learned | {"milliseconds": with_first(learned["milliseconds"], None)},
        lambda learned: learned | {"milliseconds": with_first(learned["milliseconds"], -1.0)},
        lambda learned: learned | {"observations": with_first(learned["observations"], -1.0)},
        lambda learned: learned | {"observations": with_first(learned["observations"], np.inf)},
    ],
)
def test_what_is_damaged_is_refused(damage):
    curve, other = made(), made()
    show(curve, ramp, np.random.default_rng(8), steps=20, max_rows=32)
    show(other, stairs, np.random.default_rng(9), steps=20, max_rows=32)
    before = copy.deepcopy(other)
    with pytest.raises(ValueError, match=r"rows|contexts|milliseconds|observations"):
        other.restore(damage(curve.learned()))
    assert other.learned() == before.learned()
    np.testing.assert_array_equal(other._covariance_KK, before._covariance_KK)
