"""The phases of a step on the CPU add up to its time."""

from __future__ import annotations

import time

import torch

from spec_workers.step.timer import StepTimers


def test_every_phase_is_counted_once() -> None:
    timers = StepTimers(torch.device("cpu"))
    started = time.perf_counter()
    timer = timers.begin()
    phases = (timer.drafting, timer.forward, timer.sampling, timer.waiting, timer.booking,
              timer.drafting)  # fmt: skip
    for milliseconds, phase in enumerate(phases, start=1):
        with phase():
            time.sleep(milliseconds / 1e3)
    times = timer.end()
    total_ms = (time.perf_counter() - started) * 1e3
    assert times.draft >= 1 + 6
    assert times.forward >= 2
    assert times.sample >= 3 + 4 + 5
    assert 4 <= times.waited <= times.sample
    assert times.draft + times.forward + times.sample <= total_ms
