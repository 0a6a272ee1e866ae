"""A Ray of one's own, for a test and for a program in a process of its own, on however slow a
machine.

verl's tests find this by its folder on the path: from the root, sources would hide the wheel.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import psutil

FOLDER = Path(__file__).parent
RUN_SECONDS = 3000.0  # ends a program that hangs
_START_SECONDS = 900.0  # ends the wait for a node that will never be there

# On a busy machine Ray's workers, nicer than all else, would starve, its limits would end a start
# that is merely slow, and its monitor would end workers for the memory that others use.
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_agent_register_timeout_ms": f"{_START_SECONDS * 1000:.0f}",
    "RAY_worker_register_timeout_seconds": f"{_START_SECONDS:.0f}",
    "RAY_gcs_server_port_wait_time_s": f"{_START_SECONDS:.0f}",
}


_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


def patient(services: Any) -> dict[str, Callable]:
    """Functions of ``ray._private.services`` to which a slow start is no failure.

    Ray has no setting for two of its limits: the raylet ends when its agents have not told it their
    ports after 15 s, so they are given ports; and after 30 s nobody waits for the node any more.
    """
    get_node, start_raylet = services.get_node, services.start_raylet

    @functools.wraps(get_node)
    def wait_for_node(*arguments: Any) -> Any:
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # not there yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    @functools.wraps(start_raylet)
    def start_with_ports(*arguments: Any, **options: Any) -> Any:
        ports = dict(zip(_AGENT_PORTS, _free_ports(), strict=False))
        return start_raylet(*arguments, **options | ports)

    return {"get_node": wait_for_node, "start_raylet": start_with_ports}


def _free_ports() -> Iterator[int]:
    """Ports below those that the system hands out by itself."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            yield port


@contextmanager
def own_ray(**options: Any) -> Iterator[None]:
    """Ray in this process, in a folder of its own; ``options`` of ray.init."""
    import ray
    from ray._private import services

    with (
        TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        mock.patch.multiple(services, **patient(services)),
        mock.patch.dict(os.environ, _ENVIRONMENT),
    ):
        ray.init(address="local", include_dashboard=False, _temp_dir=folder, **options)
        try:
            yield
        finally:
            ray.shutdown()


@dataclass(frozen=True, slots=True)
class RayRun:
    """A program that has ended, and the Ray that it started."""

    return_code: int
    output: str
    """The program's own. Ray copies workers' lines into it, but the last ones not always."""
    worker_logs: str
    """The lines of all workers' output, by worker."""


def run_with_ray(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    path: Sequence[Path] = (),
    cwd: Path | None = None,
) -> RayRun:
    """Run a program that starts Ray; leaves no process behind.

    ``path``: folders of modules, first on the path of every process. Raises TimeoutError, with the
    end of its output, when it hangs.
    """
    python_path = [*map(str, path), str(FOLDER), os.environ.get("PYTHONPATH", "")]
    # Ray's sockets lie in its folder, and a socket's path must be short.
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "output.log"
        full = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {
            "PYTHONPATH": os.pathsep.join(python_path),
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_prestart_worker_first_driver": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GOMP_SPINCOUNT": "10000",
            **_ENVIRONMENT,
            **environment,
        }
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=cwd, env=full, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(RUN_SECONDS)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"the program hangs:\n{_read(log)[-6000:]}") from None
            finally:
                _end_session(process)
        logs = sorted(Path(folder).glob("ray/session_latest/logs/worker-*"))
        return RayRun(code, _read(log), "".join(map(_read, logs)))


def _read(log: Path) -> str:
    return log.read_text(errors="replace")


def _end_session(leader: subprocess.Popen) -> None:
    """Kill what is left of the session: Ray gives its processes groups of their own."""
    while members := [pid for pid in psutil.pids() if _is_alive_in(leader.pid, pid)]:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()
        time.sleep(0.05)


def _is_alive_in(session: int, pid: int) -> bool:
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
