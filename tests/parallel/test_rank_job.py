"""The dataset job on two ranks: stopped, resumed and complete, with the tokens of one."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from rollout.config import ModelConfig, ParallelConfig, ParallelMode
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError
from rollout.offline import DataConfig, RunConfig, run_job
from tests.helpers.forked import forked, run_module
from tests.helpers.hang import wait_until
from tests.helpers.launch import launch
from tests.parallel.rank_checks import job_of


def rows(path: Path) -> dict[tuple[int, int], list[int]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == len({(row["prompt_index"], row["sample_index"]) for row in found})
    return {(row["prompt_index"], row["sample_index"]): row["token_ids"] for row in found}


def test_a_job_that_was_stopped_goes_on(tiny_model_path, tmp_path, monkeypatch):
    data, one, two = tmp_path / "prompts.jsonl", tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    prompts = [{"prompt": [5, 6, 7, index % 97]} for index in range(40)]
    data.write_text("\n".join(map(json.dumps, prompts)))
    options = {"folder": str(tiny_model_path), "data": str(data), "output": str(two)}
    case = "a_job_that_was_stopped_goes_on", 2, options
    monkeypatch.setenv("CASES", json.dumps([case]))
    launch("tests.parallel.rank_checks", tmp_path, ranks=2)
    config = job_of(**options | {"output": str(one)})
    run_job(config, worker_factory("none"), Console(file=StringIO()))
    assert rows(two) == rows(one)


def has_not_ended(process: psutil.Process) -> bool:
    """A process that ended and whose new parent does not ask for it stays a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_end_with_their_launcher(tmp_path):
    """Killed, it can stop nobody."""
    up = tmp_path / "up"
    waits = ["timeit", "-n1", "-r1", f"import pathlib, time; pathlib.Path({str(up)!r}).touch()"]
    launcher = forked(
        run_module, "rollout.parallel.launcher", "1", *waits, "time.sleep(600)",
        log=tmp_path / "log",
    )  # fmt: skip
    try:
        wait_until(lambda: up.exists() or not launcher.is_alive())
        assert launcher.is_alive(), (tmp_path / "log").read_text()
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert ranks
    finally:
        launcher.kill()
        launcher.join()
    wait_until(lambda: not any(map(has_not_ended, ranks)))


def test_what_a_job_on_ranks_cannot_be():
    parts = {"model": ModelConfig(path="m"), "data": DataConfig(path="p.jsonl")}
    tensor, lockstep = ParallelMode.tensor, ParallelMode.lockstep
    for make, says in (
        (lambda: RunConfig(**parts, parallel=ParallelConfig(mode=lockstep, size=2)), "mode"),
        (lambda: ParallelConfig(size=2), r"parallel\.size"),
        (lambda: ParallelConfig(mode=tensor, size=2, timeout=0), r"parallel\.timeout"),
        (lambda: ParallelConfig(mode=tensor, size=4, tensor_size=2), "tensor_size=2: must div"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            make()
