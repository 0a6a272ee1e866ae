"""The host's part of a step is measured on the real engine, and each moment counts once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import host_device
import numpy as np
import pytest
from bench_host import repeated
from harness.traces import synthetic_trace
from host_device import COVERED, Phases

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_host.py"


def test_it_runs_and_says_what_was_recorded(tmp_path) -> None:
    """In a process of its own, for it pretends that the CPU is a GPU."""
    path = tmp_path / "host.json"
    subprocess.run(
        [sys.executable, str(BENCH), "--batch", "3", "--steps", "4", "--json", str(path)],
        cwd=BENCH.parents[1], check=True, capture_output=True,
    )  # fmt: skip
    rows = {each["name"]: each["value"] for each in json.loads(path.read_text())}
    for spec in ("none", "fixed", "learned", "closed"):
        label = f"{spec}, batch 3"
        assert rows[f"{label}: a step"] > rows[f"{label}: while the device idles"] > 0
        drafts = spec in ("fixed", "learned")
        assert (rows[f"{label}: tokens of a request"] > 1) == drafts


def test_a_phase_inside_another_is_not_the_outer_ones(monkeypatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(host_device, "time", clock)

    def inner() -> None:
        clock.now += 0.02

    def outer() -> None:
        called.inner()
        clock.now += 0.01

    called = SimpleNamespace(inner=inner, outer=outer)
    phases = Phases("rest")
    phases.time_calls(called, "inner", "inner")
    phases.time_calls(called, "outer", "outer")
    called.outer()
    taken = phases.take()
    assert taken["inner"] == pytest.approx(0.02)
    assert taken["outer"] == pytest.approx(0.01)
    phases.stop()
    assert called.inner is inner
    called.inner()
    assert set(phases.take()) == {"rest"}


def test_what_the_device_covers_is_counted_by_itself(monkeypatch) -> None:
    """From the end of a launch to the beginning of the next wait."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(host_device, "time", clock)

    def takes(seconds: float) -> Callable[[], None]:
        def pass_time() -> None:
            clock.now += seconds

        return pass_time

    called = SimpleNamespace(forward=takes(1.0), learn=takes(2.0), read=takes(4.0))
    phases = Phases("rest")
    phases.time_calls(called, "forward", "layout", launches=True)
    phases.time_calls(called, "learn", "learn")
    phases.time_calls(called, "read", "read", waits=True)
    for call in (called.forward, called.learn, called.read, called.learn):
        call()
    taken = {name: seconds for name, seconds in phases.take().items() if seconds}
    assert taken == {"layout": 1.0, "learn" + COVERED: 2.0, "read": 4.0, "learn": 2.0}


def test_requests_say_recorded_responses_end_to_end() -> None:
    trace = synthetic_trace()
    made = repeated(trace, 12, 700)
    assert made.steps == [list(range(12))]
    for request, response in enumerate(made.responses):
        assert len(response) >= 700
        own = [
            trace.responses[r]
            for r in np.flatnonzero(trace.prompt_of_R == made.prompt_of_R[request])
        ]
        first = own[request % len(own)]
        assert response[: len(first)].tolist() == first.tolist()
    assert made.prompt_of_R.tolist() == [0] * 8 + [1] * 4
