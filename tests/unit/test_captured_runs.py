"""Runs that are captured: when, for how long, and what they read."""

from __future__ import annotations

import logging

import numpy as np
import torch

from rollout.graphs.captured_runs import CapturedRuns
from tests.helpers.replaying import ReplayingCapture

CPU = torch.device("cpu")


def runs_of(capture: ReplayingCapture, max_bytes: int = 10_000) -> CapturedRuns:
    return CapturedRuns("sums", max_bytes=lambda: max_bytes, capture=capture, device=CPU)


def summed(runs: CapturedRuns, numbers: list[int], others: int = 0) -> int:
    arrays = {"numbers": np.array(numbers), "others": np.full(others, 9)}
    placed = runs.place(arrays)
    assert placed is not None
    arrays["numbers"][:] = -1  # it has been sent
    found = runs.run(len(numbers), lambda: {"sum": placed["numbers"].sum()[None]})
    return int(found["sum"])


def test_what_comes_back_is_captured_and_reads_what_is_placed_then() -> None:
    capture = ReplayingCapture()
    runs = runs_of(capture)
    for count, numbers in enumerate(([1, 2], [3, 4], [5, 6], [7, 8])):
        assert summed(runs, numbers, others=count) == sum(numbers)
        assert summed(runs, [count, 1, 1]) == count + 2
    assert (runs.num_graphs, capture.replays) == (2, 6)
    assert runs.num_bytes == 2000
    assert runs.drop() == 2000
    assert (runs.num_graphs, capture.resets) == (0, 1)
    assert summed(runs, [1, 2]) == 3
    assert runs.num_graphs == 0


def test_graphs_that_outgrow_what_is_left_go_and_come_back_more_slowly() -> None:
    capture = ReplayingCapture()
    left = [2500]
    runs = CapturedRuns("sums", max_bytes=lambda: left[0], capture=capture, device=CPU)
    for _ in range(2):
        assert summed(runs, [1]) == 1
        assert summed(runs, [1, 2]) == 3
    assert runs.num_graphs == 2
    left[0] = 1500  # others took some
    assert summed(runs, [4]) == 4
    assert runs.num_graphs == 0
    for _ in range(3):
        assert summed(runs, [5]) == 5
    assert runs.num_graphs == 1


def test_a_capture_that_fails_is_told_and_lived_without(caplog) -> None:
    runs = runs_of(ReplayingCapture(fails_at=1))
    with caplog.at_level(logging.WARNING):
        for numbers in ([1, 2], [3, 4], [5], [6]):
            assert summed(runs, numbers) == sum(numbers)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "capturing sums of 1 failed" in warning
    assert runs.place({"numbers": np.array([1])}) is None
    assert runs.num_graphs == 0


def test_paused_ones_and_inputs_beyond_the_buffer_go_without() -> None:
    runs = runs_of(ReplayingCapture())
    assert runs.place({"numbers": np.zeros(1 << 20)}) is None
    runs.is_paused = True
    assert runs.place({"numbers": np.zeros(1)}) is None
