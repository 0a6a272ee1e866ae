"""Runs dataset jobs whose disk fails: ``python -m tests.e2e.extended.faulty_disk jobs.json``.

The file holds a list of ``[model, data, output, fault]``, run one after the other; disk_faults.c
says what a fault is. Prints a list of ``[exit status as waitpid has it, message]``. Each job is a
fork of this process, which has imported everything and run nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rich.console import Console

from rollout import SamplingParams
from rollout.config import MemoryConfig, ModelConfig, SchedulerConfig
from rollout.engine.worker_factory import worker_factory
from rollout.errors import RolloutError
from rollout.offline import DataConfig, OutputConfig, RunConfig, run_job

FAILED = 1


def main(jobs: Path) -> None:
    ended = [_forked(*job) for job in json.loads(jobs.read_text())]
    print(json.dumps(ended))


def _forked(model: str, data: str, output: str, fault: str) -> tuple[int, str]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 70  # what is none of our errors
        try:
            code = _run(model, data, output, fault, write)
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as told:
        message = told.read()
    return os.waitpid(child, 0)[1], message


def _run(model: str, data: str, output: str, fault: str, told: int) -> int:
    config = RunConfig(
        model=ModelConfig(path=model),
        data=DataConfig(path=data),
        sampling=SamplingParams(temperature=0.9, max_new_tokens=4, n=2, seed=3),
        output=OutputConfig(path=output, sync_seconds=0.0),
        memory=MemoryConfig(max_kv_tokens=128),
        scheduler=SchedulerConfig(max_running=2, max_step_tokens=16, chunk_len=8),
        num_threads=1,
    )
    os.environ["DISK_FAULT"] = fault
    try:
        with Path(os.devnull).open("w") as sink:
            run_job(config, worker_factory("none"), Console(file=sink))
    except RolloutError as error:
        os.write(told, str(error).encode())
        return FAILED
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
