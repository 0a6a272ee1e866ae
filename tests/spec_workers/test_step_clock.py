"""The phases of a step on the CPU add up to its time."""

from __future__ import annotations

import time

import torch

from spec_workers.step_clock import StepClock


def test_laps_and_the_forward_within_them() -> None:
    clock = StepClock(torch.device("cpu"))
    time.sleep(0.002)
    first = clock.lap()
    clock.begin_forward()
    time.sleep(0.003)
    clock.end_forward()
    time.sleep(0.001)
    clock.end_sampling()
    second = clock.lap()
    assert first >= 2
    assert 3 <= clock.forward() <= second - 1
    assert 1 <= clock.sampling() <= second - clock.forward()
    assert clock.forward() == clock.forward()
