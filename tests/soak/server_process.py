"""`specrollout serve` in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds of its machine."""

    resident_mib: int
    files: int
    threads: int
    segments: int  # mappings of shared memory


class ServerProcess:
    """Serves when this is made; `kill` it."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.log = folder / "server.log"
        self.temporary = folder / "server-tmp"
        self.temporary.mkdir()
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollout.cli", "serve", "server.port=0", *arguments],
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )
        self.port = self._wait_until_ready()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def _wait_until_ready(self) -> int:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.is_alive:
            if ready := re.search(
                r"serving \S+ at http://127\.0\.0\.1:(\d+)", self.log.read_text()
            ):
                return int(ready[1])
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")

    def usage(self) -> Usage:
        process = psutil.Process(self.process.pid)
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        return Usage(
            process.memory_info().rss >> 20,
            process.num_fds(),
            process.num_threads(),
            maps.count("/dev/shm/"),
        )

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            self.signal(signal.SIGKILL)
        self.process.wait()


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """What `/metrics` says, by name, of what has no labels."""
    text = (await client.get("/metrics")).text
    return {
        sample.name.removeprefix("specrollout_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
