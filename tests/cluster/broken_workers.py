"""Workers that cannot be built, each in its own way."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rollout.config import EngineConfig
from rollout.engine.worker import Worker
from rollout.errors import CheckpointError
from rollout.models.checkpoint import Progress
from tests.cluster.workload import ngram


def dies_on_rank_1(config: EngineConfig, progress: Progress | None = None) -> Worker:
    if os.environ["RANK"] == "1":
        print("the driver of this GPU is of another age", file=sys.stderr, flush=True)
        os._exit(3)
    return ngram()(config, progress)


def refuses_on_rank_1(config: EngineConfig, progress: Progress | None = None) -> Worker:
    if os.environ["RANK"] == "1":
        raise CheckpointError("model.safetensors is no more")
    return ngram()(config, progress)


def lacks(config: EngineConfig, progress: Progress | None = None) -> NoReturn:
    raise ModuleNotFoundError("No module named 'kernels_of_tomorrow'", name="kernels_of_tomorrow")


def sticks(flag: Path, config: EngineConfig, progress: Progress | None = None) -> Worker:
    """Whichever rank finds the file ``flag`` first in a forward takes it, and never ends it."""
    worker = ngram()(config, progress)
    runner = getattr(worker, "target", worker).runner
    run = runner.run

    def run_or_stick(*forward: Any) -> object:
        try:
            flag.unlink()
        except FileNotFoundError:
            return run(*forward)
        while True:
            time.sleep(1.0)

    runner.run = run_or_stick
    return worker
