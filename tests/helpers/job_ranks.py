"""One rank of a dataset job: ``python -m tests.helpers.job_ranks out.json``, as `launch` starts it.

Rank 0 is told to stop when a few rollouts are written; the same job then goes on, and is then
found complete. Writes how each of the three ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.rendezvous import rendezvous

from rollout.config import MemoryConfig, ModelConfig, ParallelConfig, ParallelMode
from rollout.engine.worker_factory import worker_factory
from rollout.offline import DataConfig, OutputConfig, RunConfig, run_job
from rollout.types import SamplingParams
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.signalled_job import signal_after


def config_of(model: str, data: str, output: str, size: int) -> RunConfig:
    mode = ParallelMode.tensor if size > 1 else ParallelMode.none
    return RunConfig(
        model=ModelConfig(path=model),
        data=DataConfig(path=data),
        sampling=SamplingParams(max_new_tokens=16, n=2, logit_bias={5: -1.0}, stop_token_ids=[9]),
        output=OutputConfig(path=output),
        memory=MemoryConfig(kv_bytes=1 << 20),
        parallel=ParallelConfig(mode=mode, size=size, timeout=HANG_SECONDS, check=size > 1),
    )


def main(written: Path) -> None:
    torch.set_num_threads(1)
    store = next(iter(rendezvous("env://")))  # its host hosts it as long as this
    model, data, output = json.loads(os.environ["JOB_RANKS"])
    config = config_of(model, data, output, int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        signal_after(3, signal.SIGTERM)
    statuses = []
    with Path(os.devnull).open("w") as sink:
        for _ in range(3):
            result = run_job(config, worker_factory("ngram"), Console(file=sink))
            statuses.append(result.status.value)
    written.write_text(json.dumps(statuses))
    del store


if __name__ == "__main__":
    main(Path(sys.argv[1]))
