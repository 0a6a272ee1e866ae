"""Several ranks of one program, as a launcher starts them."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.helpers.forked import forked, run_module
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port


def extensions_never_compiled(folder: Path) -> Path:
    """A folder for compiled extensions where compiling one never ends.

    torch waits for a lock as long as it is there, and nobody removes a folder in a lock's place.
    """
    for name in ("deepspeed_shm_comm", "fused_adam", "cpu_adam"):
        lock = folder / "extensions" / name / "lock"
        lock.mkdir(parents=True, exist_ok=True)
    return folder / "extensions"


def launch(module: str, folder: Path, *, ranks: int) -> list[Any]:
    """Run ``python -m module out.json`` on ``ranks`` processes of one gloo group.

    Returns what each wrote to its file, as JSON. A rank that fails or hangs is an AssertionError
    with what they printed; none is left running.
    """
    port = free_port()
    extensions = extensions_never_compiled(folder)
    outputs = [folder / f"{module}-{ranks}-{rank}.json" for rank in range(ranks)]
    logs = [output.with_suffix(".log") for output in outputs]
    processes = [
        forked(
            run_module,
            module,
            str(output),
            log=log,
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "DS_ACCELERATOR": "cpu",
                "TORCH_EXTENSIONS_DIR": str(extensions),
            },
        )
        for rank, (output, log) in enumerate(zip(outputs, logs, strict=True))
    ]
    try:
        _wait(processes)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):  # it has ended, and so has what it started
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    codes = [process.exitcode for process in processes]
    printed = "\n".join(f"rank {rank}:\n{log.read_text()[-4000:]}" for rank, log in enumerate(logs))
    assert codes == [0] * ranks, f"exit codes {codes}\n{printed}"
    return [json.loads(output.read_text()) for output in outputs]


def _wait(processes: list[ForkServerProcess]) -> None:
    """Return when all processes have ended, one has failed, or time is up."""
    end = time.monotonic() + HANG_SECONDS
    running = {process.sentinel: process for process in processes}
    while running and (ended := connection.wait(list(running), end - time.monotonic())):
        if any(running.pop(sentinel).exitcode for sentinel in ended):
            return
