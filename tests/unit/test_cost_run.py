"""What is timed before the first step are forwards as they come again."""

from __future__ import annotations

import time

import pytest

from rollout.overrides import engine_config
from spec_workers.budget.cost_run import time_forwards
from spec_workers.target import TargetWorker
from tests.helpers.replaying import ReplayingCapture

CAPTURING = 0.06  # seconds


class SlowCapture(ReplayingCapture):
    def __call__(self, run):
        time.sleep(CAPTURING)
        return super().__call__(run)


class Noted:
    def __init__(self) -> None:
        self.milliseconds: dict[int, float] = {}

    def observe(self, rows: int, longest_context: int, milliseconds: float) -> None:
        self.milliseconds[rows] = milliseconds


@pytest.mark.parametrize("seconds", [0.01, 0.3])
def test_no_forward_that_was_captured_is_taken_for_what_one_takes(tiny_model_path, seconds) -> None:
    capture, curve = SlowCapture(), Noted()
    target = TargetWorker(engine_config(str(tiny_model_path), {}), capture=capture)
    time_forwards(target, curve, seconds)
    assert capture.captures
    assert list(curve.milliseconds) == sorted(curve.milliseconds)
    # However long captures take, each size is timed once they are done.
    assert len(curve.milliseconds) == 8
    assert max(curve.milliseconds.values()) < 1e3 * CAPTURING
    target.memory.check_integrity()
