"""When drafting is given up, and looked at again."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest

from spec_workers.budget.gate import Gate


def run(gate, gain, *, steps, width=8):
    """Whether each of the steps drafted. ``gain(step)``: milliseconds gained of 10 by drafting."""
    opened = []
    for step in range(steps):
        opened.append(gate.is_open)
        if gate.is_open:
            gate.observe(width, gain(step), 10.0)
        else:
            gate.skip(width)
    return opened


def runs(opened):
    return [(is_open, len(list(each))) for is_open, each in groupby(opened)]


def losing(step):
    return -0.5


def winning(step):
    return 2.0


def test_it_stays_open_while_it_pays():
    assert all(run(Gate(), winning, steps=500))


def test_it_closes_and_looks_again_ever_more_seldom():
    opened = run(Gate(), losing, steps=5000)
    (first, judged), *rest = runs(opened)
    assert first
    closed = [length for is_open, length in rest if not is_open]
    probes = [length for is_open, length in rest if is_open]
    assert closed[:6] == [16, 32, 64, 128, 256, 512]
    assert set(closed[6:-1]) == {512}
    assert set(probes[:-1]) == {5}  # the first of them is not judged
    assert sum(opened) < 0.03 * len(opened)
    assert judged == 6  # so clear a loss is enough of few steps


def test_it_closes_on_noise_that_does_not_pay():
    rng = np.random.default_rng(1)
    opened = run(Gate(), lambda step: float(rng.normal(-0.3, 0.5)), steps=5000)
    assert sum(opened) < 0.1 * len(opened)


def test_a_doubtful_loss_takes_more_steps():
    (_, judged), *_ = runs(run(Gate(), lambda step: (-3.0, 2.5)[step % 2], steps=100))
    assert judged == 24


def test_a_few_bad_steps_do_not_close_it():
    assert all(run(Gate(), lambda step: -1.0 if step % 10 < 3 else 2.0, steps=500))


def test_it_opens_when_a_probe_pays():
    gate = Gate()
    run(gate, losing, steps=200)
    opened = run(gate, winning, steps=600)
    assert False in opened
    first = opened.index(True)
    assert all(opened[first:])
    assert gate.learned()["interval"] == 16


def test_after_it_opened_again_it_closes_for_the_first_interval():
    gate = Gate()
    run(gate, losing, steps=1500)
    run(gate, winning, steps=600)
    closed = [length for is_open, length in runs(run(gate, losing, steps=300)) if not is_open]
    assert closed[0] == 16


def closed_gate(width):
    """Just closed, after some probes, for a long time."""
    gate = Gate()
    while gate.is_open or gate.learned()["interval"] < 256:
        gate.observe(width, -1.0, 10.0) if gate.is_open else gate.skip(width)
    return gate


@pytest.mark.parametrize(
    ("closed", "width", "temperature", "probed"),
    [
        (8, 15, 1.0, False),
        (8, 4, 1.0, True),
        (8, 2, 1.0, True),
        (1, 1, 1.0, False),
        (8, 8, 1.1, False),
        (8, 8, 0.7, True),
        (8, 8, 0.0, True),
    ],
)
def test_other_kinds_of_batches_are_probed_at_once(closed, width, temperature, probed):
    """A half of the requests is another kind, and so is another temperature."""
    gate = closed_gate(closed)
    gate.skip(width, temperature)
    assert gate.is_open == probed


def test_another_kind_that_does_not_pay_is_left_alone():
    gate = closed_gate(8)
    gate.skip(4)
    assert runs(run(gate, losing, steps=100, width=4))[:2] == [(True, 5), (False, 32)]
    gate.skip(8, 0.5)
    while gate.is_open:
        gate.observe(8, -1.0, 10.0, 0.5)
    gate.skip(8, 0.5)
    assert not gate.is_open


def test_a_narrower_batch_that_pays_keeps_it_open():
    gate = closed_gate(8)
    gate.skip(2)
    assert all(run(gate, winning, steps=200, width=2))


def test_each_kind_of_batch_finds_what_it_left():
    """Batches that begin wide, where nothing pays, and end narrow, where drafts do."""
    gate, opened = Gate(), {16: [], 2: []}
    for _ in range(60):
        for width, gain in ((16, losing), (2, winning)):
            opened[width] += run(gate, gain, steps=40, width=width)
    narrow = opened[2][400:]
    # Only the first step of a batch is decided by what the last one was.
    assert sum(narrow) >= len(narrow) * 39 // 40
    assert sum(opened[16][400:]) < 0.08 * len(opened[16][400:])


def test_halves_of_two_kinds_that_are_both_in_flight_are_told_apart():
    """One half begins when the other has begun, and ends when the other has ended."""
    gate = closed_gate(8)
    gate.skip(2)
    run(gate, winning, steps=50, width=2)
    gate.skip(8)
    drafted = {8: [], 2: [False]}
    for _ in range(2000):
        for begun, ended, gain in ((8, 2, 2.0), (2, 8, -1.0)):
            drafted[begun].append(gate.is_open)
            if drafted[ended][-1]:
                gate.observe(ended, gain, 10.0)
            else:
                gate.skip(ended)
    assert 0 < sum(drafted[8]) < 100, "it is probed now and then"
    assert sum(drafted[2]) > 1990


def test_kinds_that_pay_and_do_not_learn_of_other_weights():
    gate = closed_gate(8)
    gate.skip(2)
    run(gate, winning, steps=50, width=2)
    gate.change_policy()
    opened = run(gate, winning, steps=30)
    assert opened[0]
    assert runs(opened)[1:] == [(False, 16), (True, 13)]


def test_policies_that_come_soon_are_looked_at_less_if_the_last_ones_did_not_pay():
    """A trainer changes the weights every 30 steps, and drafts pay with none of them; later they
    do."""
    gate = Gate()
    opened = []
    for _ in range(40):
        opened += run(gate, losing, steps=30)
        gate.change_policy()
    assert sum(opened[600:]) < 0.05 * len(opened[600:])
    assert sum(opened[600:]) > 0
    opened = []
    for _ in range(20):
        opened += run(gate, winning, steps=30)
        gate.change_policy()
    assert opened.index(True) <= 128
    assert all(opened[opened.index(True) :])
    while gate.is_open:
        run(gate, losing, steps=1)
    gate.change_policy()
    looked = runs(run(gate, losing, steps=70))[:3]
    assert looked == [(False, 16), (True, 5), (False, 32)], "after what paid, soon again"


@pytest.mark.parametrize("late", [1, 2])
def test_steps_that_are_judged_late_do_not_close_it_anew(late):
    """Steps in flight when the gate closes were begun while it was open."""
    gate, under_way, opened = Gate(), [], []
    for _ in range(5000):
        opened.append(gate.is_open)
        under_way.append(gate.is_open)
        if len(under_way) > late:
            if under_way.pop(0):
                gate.observe(8, -1.0, 10.0)
            elif not gate.is_open:
                gate.skip(8)
    assert sum(opened) < 0.04 * len(opened)
