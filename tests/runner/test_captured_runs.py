"""Runs that are captured: when, for how long, and what they read."""

from __future__ import annotations

import logging

import numpy as np
import torch

from rollout.runner.graphs.graph_runner import GraphRunner
from tests.helpers.replaying import ReplayingCapture

CPU = torch.device("cpu")


def runs_of(capture: ReplayingCapture, max_bytes: int = 10_000) -> GraphRunner:
    return GraphRunner("sums", max_bytes=lambda: max_bytes, capture=capture, device=CPU)


def summed(runs: GraphRunner, numbers: list[int], others: int = 0) -> int:
    arrays = {"numbers": np.array(numbers), "others": np.full(others, 9)}
    sent = runs.send(arrays)
    assert sent is not None
    arrays["numbers"][:] = -1  # it has been sent
    found = runs.run(len(numbers), lambda: {"sum": sent["numbers"].sum()[None]})
    return int(found["sum"])


def test_what_comes_is_captured_and_reads_what_is_placed_then() -> None:
    capture = ReplayingCapture()
    runs = runs_of(capture)
    for count, numbers in enumerate(([1, 2], [3, 4], [5, 6], [7, 8])):
        assert summed(runs, numbers, others=count) == sum(numbers)
        assert summed(runs, [count, 1, 1]) == count + 2
    assert (runs.num_graphs, capture.replays) == (2, 6)
    assert runs.num_bytes == 2000
    assert runs.drop() == 2000
    assert (runs.num_graphs, capture.resets) == (0, 1)
    for numbers, is_warm in (([1, 2], False), ([3, 4], True)):
        assert summed(runs, numbers) == sum(numbers)
        assert (runs.num_graphs, runs.is_warm) == (1, is_warm)


def test_what_cannot_fit_is_refused_and_the_others_stay() -> None:
    capture = ReplayingCapture()
    runs = runs_of(capture, max_bytes=2500)
    for _ in range(2):
        assert summed(runs, [1]) == 1
    capture.num_bytes = 2000
    for _ in range(4):
        assert summed(runs, [1, 2]) == 3
    assert (runs.num_graphs, runs.num_bytes, capture.resets) == (1, 1000, 0)
    capture.num_bytes = 1000
    for _ in range(2):
        assert summed(runs, [1, 2, 3]) == 6, "others are captured as before"
    assert runs.num_graphs == 2
    runs.drop()
    capture.num_bytes = 2000
    for _ in range(2):
        assert summed(runs, [1, 2]) == 3
    assert runs.num_graphs == 1, "when they are gone there is room"


def test_a_capture_that_fails_is_told_and_lived_without(caplog) -> None:
    runs = runs_of(ReplayingCapture(fails_at=1))
    with caplog.at_level(logging.WARNING):
        for numbers in ([1, 2], [3, 4], [5]):
            assert summed(runs, numbers) == sum(numbers)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "capturing sums of 1 failed" in warning
    assert runs.send({"numbers": np.array([1])}) is None
    assert runs.num_graphs == 0


def test_paused_ones_and_inputs_beyond_the_buffer_go_without() -> None:
    runs = runs_of(ReplayingCapture())
    assert runs.send({"numbers": np.zeros(1 << 20)}) is None
    runs.is_paused = True
    assert runs.send({"numbers": np.zeros(1)}) is None
