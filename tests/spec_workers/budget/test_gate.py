"""The gate: drafting is given up where it does not pay, and tried again."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest

from spec_workers.budget.gate import Gate


def run(gate, gain, *, steps, width=8, temperature=1.0):
    """Whether each of the steps drafted. ``gain``: milliseconds of 10 that drafting gains, or a
    function of the step."""
    opened = []
    for step in range(steps):
        opened.append(gate.is_open)
        if gate.is_open:
            gate.observe(width, gain(step) if callable(gain) else gain, 10.0, temperature)
        else:
            gate.skip(width, temperature)
    return opened


def runs(opened):
    """The lengths of the open and of the closed stretches."""
    stretches = [(is_open, len(list(each))) for is_open, each in groupby(opened)]
    return [[n for is_open, n in stretches if is_open == which] for which in (True, False)]


def closed_gate(width=8):
    """A gate that has just closed, after some probes, for a long time."""
    gate = Gate()
    run(gate, -1.0, steps=700, width=width)
    while gate.is_open:
        run(gate, -1.0, steps=1, width=width)
    return gate


def test_it_stays_open_while_drafts_pay():
    assert not all(run(Gate(), 0.15, steps=100)), "less than estimates leave out"
    assert all(run(Gate(), 0.25, steps=100))
    assert all(run(Gate(), lambda step: -1.0 if step % 10 < 3 else 2.0, steps=500))


def test_it_closes_and_probes_ever_more_seldom():
    opened = run(Gate(), -0.5, steps=5000)
    probes, closed = runs(opened)
    assert probes[0] < 10, "a clear loss is seen in few steps"
    assert max(probes[1:-1]) <= 5
    assert closed[0] <= 16
    assert all(after in (before, 2 * before) for before, after in pairwise(closed[:-1]))
    assert closed[-3] == closed[-2] == 512
    assert sum(opened) < 0.03 * len(opened)


def test_a_doubtful_loss_takes_more_steps_and_closes_it_too():
    (judged, *_), _ = runs(run(Gate(), lambda step: (-3.0, 2.5)[step % 2], steps=100))
    assert 20 <= judged <= 30
    rng = np.random.default_rng(1)
    opened = run(Gate(), lambda step: float(rng.normal(-0.3, 0.5)), steps=5000)
    assert sum(opened) < 0.1 * len(opened)


def test_it_opens_when_a_probe_pays_and_the_intervals_begin_anew():
    gate = closed_gate()
    opened = run(gate, 2.0, steps=600)
    assert all(opened[opened.index(True) :])
    _, closed = runs(run(gate, -0.5, steps=300))
    assert closed[0] == 16


@pytest.mark.parametrize(
    ("width", "temperature", "is_probed"),
    [(15, 1.0, False), (4, 1.0, True), (8, 1.1, False), (8, 0.7, True)],
)
def test_other_kinds_of_batches_are_probed_at_once(width, temperature, is_probed):
    """Another kind has half the requests, or another temperature."""
    gate = closed_gate(8)
    gate.skip(width, temperature)
    assert gate.is_open == is_probed
    if is_probed:
        (probe, *_), (interval, *_) = runs(run(gate, -1.0, steps=100, width=width,
                                               temperature=temperature))  # fmt: skip
        assert probe <= 5
        assert interval == 32
        assert not gate.is_open
        gate.skip(width, temperature)
        assert not gate.is_open, "it is the same kind"


def test_each_kind_of_batch_finds_what_it_left():
    """Batches begin wide, where nothing pays, and end narrow, where drafts do."""
    gate, opened = Gate(), {16: [], 2: []}
    for _ in range(60):
        for width, gain in ((16, -0.5), (2, 2.0)):
            opened[width] += run(gate, gain, steps=40, width=width)
    # The first step of a batch is decided by the batch before.
    assert sum(opened[2][400:]) >= len(opened[2][400:]) * 39 // 40
    assert sum(opened[16][400:]) < 0.08 * len(opened[16][400:])


def test_new_weights_are_probed_soon_and_less_where_the_last_ones_did_not_pay():
    """A trainer changes the weights every 30 steps; drafts pay with none of them at first."""
    gate = Gate()

    def policies(gain, count):
        opened = []
        for _ in range(count):
            opened += run(gate, gain, steps=30)
            gate.change_policy()
        return opened

    opened = policies(-0.5, 40)[600:]
    assert 0 < sum(opened) < 0.05 * len(opened)
    opened = policies(2.0, 20)
    assert opened.index(True) <= 128
    assert all(opened[opened.index(True) :])
    while gate.is_open:
        run(gate, -0.5, steps=1)
    gate.change_policy()
    _, closed = runs(run(gate, -0.5, steps=70))
    assert closed[:2] == [16, 32], "after weights that paid: soon again"


def test_steps_begun_before_it_closed_do_not_close_it_anew():
    gate, under_way, opened = Gate(), [], []
    for _ in range(5000):
        opened.append(gate.is_open)
        under_way.append(gate.is_open)
        if len(under_way) > 2:
            if under_way.pop(0):
                gate.observe(8, -1.0, 10.0)
            elif not gate.is_open:
                gate.skip(8)
    assert sum(opened) < 0.04 * len(opened)
