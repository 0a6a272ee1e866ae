"""`specrollout serve` in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

_START_SECONDS = 300.0
_CLOSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    process: psutil.Process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """CPU seconds of all its threads since it began."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def served(model: Path, *overrides: str) -> Iterator[Server]:
    """A server without keys on a free port of this machine, ready; it is drained at the end.

    ``overrides``: of its configuration, as ``specrollout serve`` takes them.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    arguments = [f"model.path={model}", f"server.port={port}", "server.log_level=error", *overrides]
    command = [sys.executable, "-m", "rollout.cli", "serve", *arguments]
    with subprocess.Popen(command) as process:
        server = Server(port, psutil.Process(process.pid))
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _answers(server.url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server did not start")
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            process.wait(_CLOSE_SECONDS)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False
