"""Prompts that change, break or are hard to read while a job goes by them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.config import SchedulerConfig
from rollout.errors import InvalidInputError
from rollout.offline import DataConfig, JobStatus, RunConfig
from tests.helpers.small_jobs import output_rows, run, small_job, with_output

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=2, seed=5)
# Long lines and small groups of rows, so that most are read after the first step.
ROWS = [{"prompt": [5 + index, 6], "id": index, "pad": "x" * 4000} for index in range(12)]


@pytest.fixture
def config(text_model_path, tmp_path):
    config = small_job(text_model_path, tmp_path, ROWS, PARAMS)
    return replace(config, scheduler=SchedulerConfig(max_running=1, max_step_tokens=16))


def with_suffix(config: RunConfig, suffix: str) -> RunConfig:
    """The job from and to files of that kind."""
    if suffix == ".jsonl":
        return config
    data = Path(config.data.path).with_suffix(suffix)
    pq.write_table(pa.Table.from_pylist(ROWS), data, row_group_size=2, compression="none")
    output = str(Path(config.output.path or "").with_suffix(suffix))
    return with_output(replace(config, data=DataConfig(path=str(data))), path=output)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(path.read_bytes().replace(b"xxxx", b"yyyy"))


@pytest.mark.parametrize(
    ("suffix", "change"), [(".jsonl", rewrite), (".jsonl", Path.unlink), (".parquet", truncate)]
)
def test_a_job_runs_what_it_began_with(config, monkeypatch, suffix, change):
    config = with_suffix(config, suffix)
    path = Path(config.data.path)
    original, changes = path.read_bytes(), []
    real_step = RolloutEngine.step

    def step(engine):
        if not changes:
            changes.append(change(path))
        return real_step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", step)
        assert run(config).status is JobStatus.COMPLETED
    assert not path.exists() or path.read_bytes() != original
    carried = [{name: row[name] for name in ROWS[0]} for row in output_rows(config)]
    assert carried == ROWS
    path.write_bytes(original)
    assert run(config).status is JobStatus.NOTHING_TO_DO


def parquet_job(config: RunConfig, columns: Any, **options: Any) -> RunConfig:
    path = Path(config.data.path).with_suffix(".parquet")
    pq.write_table(pa.table(columns) if isinstance(columns, dict) else columns, path, **options)
    return replace(config, data=DataConfig(path=str(path)))


BAD_TEXT = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
UNREADABLE: list[tuple[Any, str]] = [
    ({"prompt": BAD_TEXT}, "cannot be read as Parquet: 'utf-8' codec"),
    ({"prompt": ["a"], "x": pa.array([10**7], pa.date32())}, "cannot be read as Parquet: date val"),
    (pa.table([["a"], [1], [2]], names=["prompt", "x", "x"]), "has columns twice: x"),
    ({"x": pa.array([1])}, "1 of 1 rows cannot be used:\n  row 1 has no prompt"),
    ({"prompt": pa.array([None], pa.string())}, "row 1 has no prompt: prompt is null"),
    ({"prompt": pa.array([], pa.string())}, "has no usable prompt"),
]


def test_parquet_that_python_cannot_hold(config, tmp_path):
    for columns, reason in UNREADABLE:
        for output in ("out.jsonl", "out.parquet"):
            unreadable = with_output(parquet_job(config, columns), path=str(tmp_path / output))
            with pytest.raises(InvalidInputError, match=reason) as raised:
                run(unreadable)
            assert raised.value.field == "data.path"
