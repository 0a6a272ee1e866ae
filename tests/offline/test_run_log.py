"""The job's logs: JSONL and TensorBoard."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollout.errors import InvalidInputError, MetricsError
from rollout.offline.run_log import JsonlLog, TensorBoardMetrics


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_jsonl_goes_on_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    for first in (0, 2):
        log = JsonlLog(path)
        for step in (first, first + 1):
            log.write("step", {"step": step, "accept_length": 1.5})
        assert len(lines_of(path)) == first + 2  # there before close
        log.close()
    lines = lines_of(path)
    assert [(line["kind"], line["step"], line["accept_length"]) for line in lines] == [
        ("step", step, 1.5) for step in range(4)
    ]
    assert lines[0]["time"] <= lines[-1]["time"]


def test_a_torn_line_does_not_take_the_next_with_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "step", "st')
    log = JsonlLog(path)
    log.write("run", {"n": 8})
    log.close()
    torn, whole, end = path.read_text().split("\n")
    assert (torn, end) == ('{"kind": "step", "st', "")
    assert json.loads(whole)["n"] == 8


def test_what_json_has_no_number_for(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = JsonlLog(path)
    log.write("learned", {"budget": {"cost": [1.0, float("nan"), float("inf")]}, "gate": (2, -1.5)})
    log.close()
    (line,) = lines_of(path)
    assert line["budget"] == {"cost": [1.0, None, None]}
    assert line["gate"] == [2, -1.5]


def test_jsonl_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsError, match=r"log.jsonl=.*cannot be written: File exists"):
        JsonlLog(tmp_path / "file" / "run.jsonl")
    full = JsonlLog(Path("/dev/full"))
    with pytest.raises(MetricsError, match="No space left"):
        full.write("step", {"drafted": 1})


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
