"""The forwards that are timed before the first step are steady-state."""

from __future__ import annotations

import time

from rollout.config import engine_config
from spec_workers.budget import cost_run
from spec_workers.target import TargetWorker
from tests.helpers.replaying import ReplayingCapture

CAPTURING = 60.0  # seconds


class Clock:
    """The machine's clock, put forward."""

    ahead = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead


class SlowCapture(ReplayingCapture):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __call__(self, function, make_outputs, max_bytes=None):
        self._clock.ahead += CAPTURING
        return super().__call__(function, make_outputs, max_bytes)


class Noted:
    def __init__(self) -> None:
        self.milliseconds: dict[int, float] = {}

    def observe(self, rows: int, longest_context: int, milliseconds: float) -> None:
        self.milliseconds[rows] = milliseconds


def test_captures_are_not_timed(tiny_model_path, monkeypatch) -> None:
    clock, curve = Clock(), Noted()
    monkeypatch.setattr(cost_run, "time", clock)
    capture = SlowCapture(clock)
    target = TargetWorker(engine_config(str(tiny_model_path), {}), capture=capture)
    cost_run.time_forwards(target, curve, 0.05)
    assert capture.captures
    assert len(curve.milliseconds) == 8, "each size is timed once they are done"
    assert max(curve.milliseconds.values()) < 1e3 * CAPTURING / 2
    target.memory.check_integrity()
