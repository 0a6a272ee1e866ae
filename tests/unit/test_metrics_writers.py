"""Counters to JSONL and TensorBoard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollout.errors import InvalidInputError
from rollout.metrics import JsonlMetrics, MetricsError, TensorBoardMetrics


def test_jsonl_goes_on_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.jsonl"
    for first in (0, 2):
        writer = JsonlMetrics(path)
        for step in (first, first + 1):
            writer.write(step, {"accept_length": 1.5, "drafted": step})
        assert len(path.read_text().splitlines()) == first + 2  # there before close
        writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["drafted"], line["accept_length"]) for line in lines] == [
        (step, step, 1.5) for step in range(4)
    ]
    assert lines[0]["time"] <= lines[-1]["time"]


def test_jsonl_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsError, match=r"log.jsonl=.*cannot be written: File exists"):
        JsonlMetrics(tmp_path / "file" / "steps.jsonl")
    full = JsonlMetrics(Path("/dev/full"))
    with pytest.raises(MetricsError, match="No space left"):
        full.write(0, {"drafted": 1})


def test_tensorboard_scalars(tmp_path: Path) -> None:
    writer = TensorBoardMetrics(tmp_path)
    for step in range(3):
        writer.write(step, {"accept_length": 1 + step / 2})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("rollout/accept_length")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(0, 1.0), (1, 1.5), (2, 2.0)]


def test_tensorboard_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InvalidInputError, match=r"log.tensorboard=.*specrollout\[metrics\]"):
        TensorBoardMetrics(tmp_path)
