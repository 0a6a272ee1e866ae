"""An engine of several ranks for a program that no launcher started: an actor of a trainer, say.

The program's process is rank 0 and leads. It starts the other ranks on this machine; each is

    python -m rollout.engine.rank_processes

and reads the engine to open from its standard input.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from rollout.config import EngineConfig
from rollout.engine.engine import RolloutEngine
from rollout.engine.spmd import check_ranks, follow, open_leading
from rollout.engine.worker_factory import WorkerFactory
from rollout.errors import RolloutError
from rollout.parallel import host_store, launch_variables
from rollout.parallel.launcher import end_ranks, failure, start_rank

log = logging.getLogger(__name__)


def open_on_ranks(config: EngineConfig, factory: WorkerFactory) -> RolloutEngine:
    """Open the engine on as many ranks as ``config.parallel`` says, this process among them.

    Several ranks are one engine to the caller: what it calls is called on all of them. They end
    when it is closed, and where this process ends.

    Raises InvalidInputError for a model that cannot be partitioned among so many ranks,
    ParallelError where one is lost, and what `RolloutEngine.from_config` does.
    """
    open_engine = partial(RolloutEngine.from_config, config, factory)
    if config.parallel.size == 1:
        return open_engine()
    check_ranks(config.parallel, config.model)
    with ExitStack() as ranks:
        port = ranks.enter_context(_other_ranks(config, factory))
        # Where a launcher has started this process, it is the rank of something else there.
        with _environment(launch_variables(0, config.parallel.size, port, 0)):
            return open_leading(config.parallel, open_engine, ranks)


@contextmanager
def _other_ranks(config: EngineConfig, factory: WorkerFactory) -> Iterator[int]:
    """The port of a store where rank 0 meets the others, which have been started. They end with the
    context: by themselves where it is left without an error."""
    size = config.parallel.size
    store = host_store()
    processes: dict[int, subprocess.Popen[bytes]] = {}
    ending = threading.Event()
    is_clean = False
    try:
        for rank in range(1, size):
            command = ["rollout.engine.rank_processes"]
            process = start_rank(rank, size, store.port, command, stdin=subprocess.PIPE)
            processes[rank] = process
            watch = partial(_log_failure, rank, size, process, ending)
            threading.Thread(target=watch, name=f"rank-{rank}", daemon=True).start()
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:  # where it has failed, its log says why
                pickle.dump((config, factory), process.stdin)
        yield store.port
        is_clean = True
    finally:
        ending.set()
        end_ranks(list(processes.values()), terminate=not is_clean)


def _log_failure(
    rank: int, size: int, process: subprocess.Popen[bytes], ending: threading.Event
) -> None:
    """Wait for the end of a rank, and say what it was unless all end."""
    code = process.wait()
    if code and not ending.is_set():
        log.error("%s", failure(rank, size, code))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """While the context lasts this process has the environment of a launched rank."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main() -> None:
    """Follow rank 0 until it closes the engine or is gone."""
    config, factory = pickle.load(sys.stdin.buffer)  # rank 0's own, which has started this process
    try:
        follow(config.parallel, partial(RolloutEngine.from_config, config, factory))
    except RolloutError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
