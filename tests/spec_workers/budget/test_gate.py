"""The gate: drafting is given up where it does not pay, and tried again."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np

from spec_workers.budget.gate import Gate


def run(gate, gain, *, steps, width=8):
    """Whether each of the steps drafted. ``gain``: milliseconds of 10 that drafting gains, or a
    function of the step."""
    opened = []
    for step in range(steps):
        gate.enter(width)
        opened.append(gate.is_open)
        if gate.is_open:
            gate.observe(width, gain(step) if callable(gain) else gain, 10.0)
        else:
            gate.skip(width)
    return opened


def runs(opened):
    """The lengths of the open and of the closed stretches."""
    stretches = [(is_open, len(list(each))) for is_open, each in groupby(opened)]
    return [[n for is_open, n in stretches if is_open == which] for which in (True, False)]


def closed_gate():
    """A gate that has just closed, after some probes, for a long time."""
    gate = Gate()
    run(gate, -1.0, steps=3000)
    while not gate.is_open:
        gate.skip(8)
    while gate.is_open:
        gate.observe(8, -1.0, 10.0)
    return gate


def test_it_stays_open_while_drafts_pay():
    assert not all(run(Gate(), 0.35, steps=500)), "less than estimates leave out"
    assert all(run(Gate(), 0.45, steps=500))
    assert all(run(Gate(), lambda step: -1.0 if step % 10 < 3 else 2.0, steps=500))


def test_it_closes_and_probes_ever_more_seldom():
    opened = run(Gate(), -2.0, steps=5000)
    probes, closed = runs(opened)
    assert probes[0] < 10, "a clear loss is seen in few steps"
    assert all(after >= before - 1 for before, after in pairwise(closed[:-1]))  # rounded
    assert closed[-2] == 512
    assert sum(opened) * 0.2 < 0.015 * len(opened), "of the time is lost"


def test_a_text_on_which_drafts_lose_does_not_close_it_for_the_next():
    def gain(step):
        return -5.0 if step // 120 % 3 == 2 else 4.0

    opened = run(Gate(), gain, steps=6000, width=1)
    paying = [is_open for step, is_open in enumerate(opened) if gain(step) > 0]
    losing = [is_open for step, is_open in enumerate(opened) if gain(step) < 0]
    assert sum(paying) > 0.85 * len(paying)
    assert sum(losing) < 0.35 * len(losing)


def test_gains_of_long_ago_are_lost_but_once():
    gate = Gate()
    run(gate, 5.0, steps=5000)
    lost = sum(run(gate, -2.0, steps=10_000))
    assert 0.2 * lost < 40 + 0.005 * 10_000


def test_a_doubtful_loss_closes_it_too():
    rng = np.random.default_rng(1)
    opened = run(Gate(), lambda step: float(rng.normal(-0.3, 0.5)), steps=5000)
    assert sum(opened) < 0.3 * len(opened)


def test_it_opens_when_a_probe_pays():
    opened = run(closed_gate(), 2.0, steps=600)
    assert all(opened[opened.index(True) :])


def test_batches_of_another_width_find_what_they_left():
    """Batches begin wide, where nothing pays, and end narrow, where drafts do."""
    gate, opened = Gate(), {16: [], 2: []}
    for _ in range(60):
        for width, gain in ((16, -0.5), (2, 2.0)):
            opened[width] += run(gate, gain, steps=40, width=width)
    assert all(opened[2][400:])
    assert sum(opened[16][400:]) < 0.15 * len(opened[16][400:])


def test_widths_in_turn_are_judged_apart():
    """Widths on either side of an octave's end come in turn while prompts are read."""
    gate, opened = Gate(), {7: [], 8: []}
    for _ in range(1000):
        for width, gain in ((7, 3.0), (8, -2.0)):
            may_draft = gate.may_draft
            [is_open] = run(gate, gain, steps=1, width=width)
            opened[width].append(is_open and may_draft)
    assert sum(opened[7]) > 990
    assert sum(opened[8]) < 100


def test_a_step_that_lost_much_counts_as_one_that_lost_some():
    gate = Gate()
    run(gate, -1000.0, steps=1)
    assert run(gate, 2.0, steps=600).index(True) <= 512


def test_what_is_learned_late_does_not_change_the_step_in_hand():
    gate = Gate()
    gate.enter(1)
    while gate.is_open:
        gate.observe(1, -5.0, 10.0)
    gate.enter(2)
    gate.skip(1)  # of the step before
    assert gate.is_open


def test_new_weights_are_probed_sooner():
    assert run(closed_gate(), 2.0, steps=600).index(True) > 128
    gate = closed_gate()
    gate.change_policy()
    opened = run(gate, 2.0, steps=600)
    assert opened.index(True) <= 128
    assert all(opened[opened.index(True) :])


def test_steps_begun_before_it_closed_do_not_close_it_anew():
    gate, under_way, opened = Gate(), [], []
    for _ in range(5000):
        gate.enter(8)
        opened.append(gate.is_open)
        under_way.append(gate.is_open)
        if len(under_way) > 2:
            if under_way.pop(0):
                gate.observe(8, -2.0, 10.0)
            elif not gate.is_open:
                gate.skip(8)
    assert sum(opened) < 0.06 * len(opened)
