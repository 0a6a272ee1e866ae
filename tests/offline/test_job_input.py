"""Prompts that change, break or are hard to read while a job goes by them."""

from __future__ import annotations

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
ROWS = [{"prompt": [5 + index, 6], "id": index} for index in range(12)]


@pytest.fixture
def config(text_model_path, tmp_path):
    config = small_job(text_model_path, tmp_path, ROWS, PARAMS)
    return replace(config, scheduler=SchedulerConfig(max_running=1, max_step_tokens=16))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_job_runs_what_it_began_with(config, monkeypatch, suffix):
    path = Path(config.data.path).with_suffix(suffix)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    output = str(Path(config.output.path or "").with_suffix(suffix))
    config = with_output(replace(config, data=DataConfig(path=str(path))), path=output)
    real_step = RolloutEngine.step

    def step(engine):
        path.unlink(missing_ok=True)
        return real_step(engine)

    monkeypatch.setattr(RolloutEngine, "step", step)
    assert run(config).status is JobStatus.COMPLETED
    assert [{name: row[name] for name in ROWS[0]} for row in output_rows(config)] == ROWS


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
