"""What each tracker that is installed has of a run's steps."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from pathlib import Path

import pytest

from rollout.errors import InvalidInputError, MetricsError
from rollout.offline.config import LogConfig, Tracker
from rollout.offline.tracker import open_tracker

NAME = "runs/some/rollouts.jsonl"
COUNTER = "rollout/accept_length"
SCALARS = [(step, 1 + step / 2) for step in range(3)]


def in_tensorboard(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events"))
    events.Reload()
    return [(scalar.step, scalar.value) for scalar in events.Scalars(COUNTER)]


def in_wandb(folder: Path) -> list[tuple[int, float]]:
    """Its file is protocol buffers: a key, two bytes, and the length and text of a JSON value."""
    import wandb

    wandb.teardown()  # else written when the process ends
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    record = file.read_bytes()
    assert NAME.encode() in record
    ends = [found.end() for found in re.finditer(COUNTER.encode() + rb"\x82\x01", record)]
    values = {json.loads(record[end + 1 : end + 1 + record[end]]) for end in ends}
    return list(enumerate(sorted(values)))  # the summary repeats some


def in_trackio(folder: Path) -> list[tuple[int, float]]:
    with sqlite3.connect(folder / "specrollout.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step")
        found = [(name, step, json.loads(metrics)[COUNTER]) for name, step, metrics in rows]
    assert {name for name, *_ in found} == {NAME}
    return [(step, value) for _, step, value in found]


def in_mlflow(folder: Path) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    (run,) = MlflowClient().search_runs(["0"])
    assert (run.info.run_name, run.data.params["seed"]) == (NAME, "7")
    history = MlflowClient().get_metric_history(run.info.run_id, COUNTER)
    return sorted((each.step, each.value) for each in history)


READERS = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "trackio": in_trackio,
    "mlflow": in_mlflow,
}


@pytest.mark.parametrize("name", Tracker)
def test_scalars(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    for variable, value in (
        ("WANDB_MODE", "offline"),
        ("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlflow'}"),
        ("MLFLOW_ALLOW_FILE_STORE", "true"),  # a database takes ten seconds to make
    ):
        monkeypatch.setenv(variable, value)
    if name == "trackio":  # whose import has read TRACKIO_DIR
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    run = open_tracker(name, tmp_path / "events", NAME, {"seed": 7, "spec": {"budget": None}})
    for step, value in SCALARS:
        run.log({COUNTER: value, "rollout/kv_used": 5}, step)
    run.close()
    assert READERS[name](tmp_path) == SCALARS


def test_the_reason_why_one_cannot_be_opened(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MetricsError, match=r"log\.tracker=tensorboard .*: .*file"):
        open_tracker(Tracker.tensorboard, tmp_path / "file", NAME, {})


@pytest.mark.parametrize("name", Tracker)
def test_one_that_is_missing_is_refused_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInputError, match=rf"log\.tracker='{name}'.*specrollout\[{name}\]"):
        LogConfig(tracker=name)
