"""Processes that begin with torch imported: forks of a server that is started once a session.

A fresh interpreter spends two seconds of a processor on that, a fork none.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "rollout", "spec_workers"])


def forked(
    function: Callable[..., object],
    *arguments: Any,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """A process that runs ``function``, leads a group of its own and counts with one thread.

    ``function`` and ``arguments`` are pickled. ``log``: a file for what it prints. ``environment``:
    beside this process's.
    """
    told = os.environ | dict(environment or {})
    with_one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.get(name) for name in with_one_thread}
    os.environ.update(with_one_thread)  # what torch reads as it is imported
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    process = _CONTEXT.Process(target=_run, args=(function, arguments, log, told | with_one_thread))
    process.start()
    return process


def run_module(module: str, *arguments: str) -> None:
    """``python -m module argument ...``, in this process."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    log: Path | None,
    environment: dict[str, str],
) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    function(*arguments)
