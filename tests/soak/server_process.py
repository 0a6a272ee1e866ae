"""`specrollout serve` in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
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
    """Resources that a process holds."""

    resident_mib: int
    files: int
    threads: int
    segments: int  # mappings of shared memory


class ServerProcess:
    """Serves when `wait_until_ready` returns; `kill` it."""

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
                env=os.environ
                | {
                    "PYTHONUNBUFFERED": "1",
                    "TMPDIR": str(self.temporary),
                    # Else it keeps 1,024 compiled products, up to a MiB each, which hide a leak.
                    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
                },
                start_new_session=True,
            )
        self.port = 0  # known when it is ready

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def wait_until_ready(self) -> None:
        ready = re.compile(r"serving \S+ at http://127\.0\.0\.1:(\d+)")
        async with asyncio.timeout(START_SECONDS):
            while not (found := ready.search(self.log.read_text())):
                if not self.is_alive:
                    raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
                await asyncio.sleep(0.05)
        self.port = int(found[1])

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
    """Values of `/metrics` without labels, by name."""
    text = (await client.get("/metrics")).text
    return {
        sample.name.removeprefix("specrollout_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
