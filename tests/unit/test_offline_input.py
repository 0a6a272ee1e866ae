"""Prompts that change, break or are hard to read while a job goes by them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.config import SchedulerConfig
from rollout.offline import DataConfig, JobStatus, RunConfig
from tests.helpers.small_jobs import output_rows, run, small_job, with_output, write_rows

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=2, seed=5)
# Long lines and small groups of rows, so that most are read after the first step.
ROWS = [{"prompt": [5 + index, 6], "id": index, "pad": "x" * 4000} for index in range(12)]


@pytest.fixture
def config(text_model_path: Path, tmp_path: Path) -> RunConfig:
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


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"prompt": [9], "id": 99, "pad": ""}\n')


def rename(path: Path) -> None:
    other = path.with_name("other")
    write_rows(other, [{"prompt": [9], "id": 99, "pad": "z"}])
    other.replace(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("change", [truncate, rewrite, append, rename, Path.unlink])
def test_a_job_runs_what_it_began_with(
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    change: Callable[[Path], None],
) -> None:
    config = with_suffix(config, suffix)
    path = Path(config.data.path)
    original, changes = path.read_bytes(), []
    real_step = RolloutEngine.step

    def step(engine: RolloutEngine) -> Any:
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
