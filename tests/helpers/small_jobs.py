"""Dataset jobs on a tiny model that ends within a second."""

from __future__ import annotations

import io
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

from rollout import SamplingParams
from rollout.config import DType, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.engine.worker_factory import worker_factory
from rollout.offline import (
    ChatTemplateMode,
    DataConfig,
    JobResult,
    OutputConfig,
    RunConfig,
    run_job,
)

CHAT = [{"role": "user", "content": "one two"}]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "three four five", "answer": 12},
    {"prompt": CHAT, "answer": 3},
    {"prompt": [5, 6, 7], "answer": None},
    {"prompt": "nine", "answer": 9},
]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=12, n=3, seed=5)


def small_job(
    model: Path, folder: Path, prompts: list[dict[str, Any]], params: SamplingParams
) -> RunConfig:
    """From ``folder``/prompts.jsonl, written here, to ``folder``/rollouts.jsonl.

    Text is taken as it stands, as `RolloutEngine.generate` takes it.
    """
    return RunConfig(
        model=ModelConfig(path=str(model), dtype=DType.float32),
        data=DataConfig(
            path=write_rows(folder / "prompts.jsonl", prompts), chat_template=ChatTemplateMode.never
        ),
        sampling=params,
        output=OutputConfig(path=str(folder / "rollouts.jsonl")),
        memory=MemoryConfig(max_kv_tokens=512),
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=16, chunk_len=8),
        num_threads=1,
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(config: RunConfig, spec: str = "none", **options: Any) -> JobResult:
    return run_job(config, worker_factory(spec, **options), Console(file=io.StringIO()))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A job's rows, in order of prompt and sample."""
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["prompt_index"], row["sample_index"]))


def output_rows(config: RunConfig) -> list[dict[str, Any]]:
    return read_rows(Path(config.output.path or ""))


def with_output(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, output=replace(config.output, **changes))


@contextmanager
def small_files(max_bytes: int) -> Iterator[None]:
    """A full disk: no file of this process may grow beyond ``max_bytes``."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)
