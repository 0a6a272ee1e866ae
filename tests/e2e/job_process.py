"""Runs the dataset job in processes that can be killed.

Children of a fork server, which has imported the engine but run nothing, start in a blink.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console

from rollout.engine.worker import worker_factory
from rollout.offline import RunConfig, run_job


def start_job(config: RunConfig, spec: str) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_run, args=(config, spec))
    process.start()
    return process


def _run(config: RunConfig, spec: str) -> None:
    with Path(os.devnull).open("w") as sink, contextlib.redirect_stdout(sink):
        options = {"corpus_bytes": 1 << 20} if spec == "ngram" else {}  # saved in a blink
        run_job(config, worker_factory(spec, **options), Console(file=sink))
