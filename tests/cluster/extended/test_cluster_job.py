"""The dataset job on Ray, from the command line: stopped or with a replica killed, it goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

pytest.importorskip("ray")

from tests.cluster.ray_processes import placement_groups, replica_processes, wait_until_gone
from tests.frameworks.shared.ray_sessions import patient
from tests.helpers.forked import ROOT, forked
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.signalled_job import run_signalled

NUM_PROMPTS, N = 40, 4
RAY = ("cluster=ray", "cluster.replicas=2", "cluster.num_cpus=1", "cluster.report_seconds=0.005")


def run_patiently(*arguments: Any) -> None:
    """Run the job where a Ray that starts slowly is awaited, however busy the machine is."""
    from ray._private import services

    with mock.patch.multiple(services, **patient(services)):
        run_signalled(*arguments)


@pytest.fixture
def start(tiny_model_path: Path, tmp_path: Path) -> Iterator:
    """Starts the job in a process group of its own."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [3 + i % 50, *range(5, 6 + i % 5)], "id": i} for i in range(NUM_PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        f"model.path={tiny_model_path}", f"data.path={prompts}", f"sampling.n={N}",
        "sampling.max_new_tokens=60", "sampling.ignore_eos=true", "sampling.seed=11",
        "memory.max_kv_tokens=2048", "scheduler.max_running=4", "scheduler.max_step_tokens=16",
        "scheduler.chunk_len=8", "num_threads=1", "spec.corpus_bytes=1048576",
        f"hydra.run.dir={tmp_path / 'hydra'}",
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "PYTHONPATH": path}
    started: list[ForkServerProcess] = []

    def start(output: Path, *own: str, stops_after: int = 0) -> ForkServerProcess:
        process = forked(
            run_patiently, str(tmp_path), stops_after, signal.SIGSTOP, *options,
            f"output.path={output}", *own, log=tmp_path / "log", environment=quiet,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def wait_until_stopped(process: ForkServerProcess, log: Path) -> None:
    driver = psutil.Process(process.pid)
    wait_until(lambda: not process.is_alive() or driver.status() == psutil.STATUS_STOPPED)
    assert process.is_alive(), f"it ended with {process.exitcode}: {log.read_text()}"


def test_stopped_by_ctrl_c_and_resumed_while_a_replica_is_killed(start, tmp_path, own_ray):
    """First replicas of two ranks on a Ray of its own, though another runs here that is this
    process's, then replicas of one on that."""
    alone, output = tmp_path / "one.parquet", tmp_path / "many.parquet"
    log = tmp_path / "log"
    process = start(alone)
    process.join(HANG_SECONDS)
    assert process.exitcode == 0, log.read_text()

    process = start(output, *RAY, "parallel=tensor", "parallel.size=2", stops_after=20)
    wait_until_stopped(process, log)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(replica_processes(process.pid)) == 4
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of the group get it
    os.kill(process.pid, signal.SIGCONT)
    process.join(HANG_SECONDS)
    assert process.exitcode == 128 + signal.SIGINT, log.read_text()
    assert "The same command goes on from there" in log.read_text().replace("\n", " ")
    wait_until_gone(below)
    written = Path(f"{output}.partial.jsonl").read_bytes().count(b"\n")
    assert 20 <= written < NUM_PROMPTS * N

    process = start(output, *RAY, f"cluster.address={own_ray}", stops_after=20)
    wait_until_stopped(process, log)
    replicas = replica_processes()
    replicas[0].kill()
    os.kill(process.pid, signal.SIGCONT)
    process.join(HANG_SECONDS)
    assert process.exitcode == 0, log.read_text()
    wait_until_gone(replicas)
    assert "died and is started anew" in log.read_text()
    assert output.read_bytes() == alone.read_bytes()
    lines = [json.loads(line) for line in Path(f"{output}.log").read_text().splitlines()]
    assert {line["kind"] for line in lines} >= {"run", "step", "rollout", "totals"}
    assert sum(line["kind"] == "rollout" for line in lines) == NUM_PROMPTS * N


def test_killed_while_replicas_start_it_ends_at_once_and_leaves_none(start, tmp_path, own_ray):
    """Ray's own handlers would abort the process, or end it with another status."""
    before = replica_processes()
    log = tmp_path / "log"
    ranks = ("parallel=tensor", "parallel.size=2")
    process = start(tmp_path / "out.jsonl", *RAY, f"cluster.address={own_ray}", *ranks)
    wait_until(log.exists)
    wait_until(lambda: not process.is_alive() or "starting 2 replicas" in log.read_text())
    assert process.is_alive(), log.read_text()
    process.terminate()
    process.join(HANG_SECONDS)
    assert process.exitcode == 128 + signal.SIGTERM, log.read_text()
    assert not any(word in log.read_text() for word in ("Traceback", "SIGTERM"))
    assert not list(tmp_path.glob("out.jsonl*"))
    wait_until_gone([each for each in replica_processes() if each not in before])
    wait_until(lambda: not placement_groups())
