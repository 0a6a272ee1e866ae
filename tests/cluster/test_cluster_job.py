"""The dataset job on Ray, from the command line: stopped, a replica killed, it ends as ever."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from rich.console import Console

from rollout import SamplingParams
from rollout.config import MemoryConfig, ModelConfig, SchedulerConfig
from rollout.offline import DataConfig, OutputConfig, RunConfig, run_job
from rollout.specs import worker_factory
from tests.cluster.ray_processes import replica_processes, wait_until_gone

pytestmark = pytest.mark.timeout(600)

NUM_PROMPTS, N, MAX_NEW_TOKENS = 100, 4, 100
ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, tiny_model_path: Path) -> RunConfig:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [3 + i % 50, *range(5, 6 + i % 5)], "id": i} for i in range(NUM_PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        model=ModelConfig(path=str(tiny_model_path)),
        data=DataConfig(path=str(prompts)),
        sampling=SamplingParams(n=N, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True, seed=11),
        output=OutputConfig(path=str(tmp_path / "one.parquet")),
        memory=MemoryConfig(max_kv_tokens=2048),
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=16, chunk_len=8),
        num_threads=1,
    )


@pytest.fixture
def start(config: RunConfig, tmp_path: Path) -> Iterator:
    """Starts the same job on two replicas, in a process group of its own."""
    started: list[subprocess.Popen] = []

    def start(output: Path) -> subprocess.Popen:
        command = [
            sys.executable, "-m", "rollout.cli", "cluster=ray", "cluster.replicas=2",
            "cluster.num_cpus=1", "cluster.address=local", "cluster.report_seconds=0.005",
            f"model.path={config.model.path}", f"data.path={config.data.path}",
            f"output.path={output}", "spec.corpus_bytes=1048576",
            f"sampling.n={N}", f"sampling.max_new_tokens={MAX_NEW_TOKENS}",
            "sampling.ignore_eos=true", "sampling.seed=11", "memory.max_kv_tokens=2048",
            "scheduler.max_running=4", "scheduler.max_step_tokens=16", "scheduler.chunk_len=8",
            f"log.jsonl={tmp_path / 'log.jsonl'}", "num_threads=1",
            f"hydra.run.dir={tmp_path / 'hydra'}",
        ]  # fmt: skip
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment,
                start_new_session=True,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_lines(journal: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while not journal.exists() or journal.read_bytes().count(b"\n") < count:
        if process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode}: {process.communicate()[0]}")
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_stopped_by_ctrl_c_and_resumed_while_a_replica_is_killed(config, start, tmp_path):
    run_job(config, worker_factory("none"), Console(file=io.StringIO()))
    output, journal = tmp_path / "many.parquet", tmp_path / "many.parquet.partial.jsonl"

    process = start(output)
    wait_for_lines(journal, 20, process)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(replica_processes(process.pid)) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of the group get it
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, text
    assert "run the same command again" in text.replace("\n", " ")
    wait_until_gone(below, 60)
    written = journal.read_bytes().count(b"\n")
    assert 20 <= written < NUM_PROMPTS * N

    process = start(output)
    wait_for_lines(journal, written + 20, process)
    replica_processes(process.pid)[0].kill()
    below = psutil.Process(process.pid).children(recursive=True)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    wait_until_gone(below, 60)
    assert "died and is started anew" in text
    assert output.read_bytes() == Path(config.output.path).read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} >= {"run", "step", "rollout", "totals"}
    assert sum(line["kind"] == "rollout" for line in lines) == NUM_PROMPTS * N
