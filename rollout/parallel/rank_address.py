"""The process that a rank is, as other ranks of its host can look for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """A process: its host, as far as process ids mean the same, its id and when it started."""

    host: str
    pid: int
    started: float

    @classmethod
    def here(cls) -> Self:
        """This process."""
        kernel, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
        host = ""  # not Linux: nobody can look
        if kernel.exists():
            host = f"{kernel.read_text().strip()}/{os.readlink(namespace)}"
        process = psutil.Process()
        return cls(host=host, pid=process.pid, started=process.create_time())

    @classmethod
    def of(cls, text: str) -> Self:
        """The address that `text` of another process gave."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """The address as text, for `of`."""
        return json.dumps(asdict(self))

    def is_gone(self, here: RankAddress) -> bool:
        """Whether the process has ended, as ``here`` can see it; False on another host."""
        if not self.host or self.host != here.host:
            return False
        try:
            process = psutil.Process(self.pid)
            ended = process.status() == psutil.STATUS_ZOMBIE
            return ended or process.create_time() != self.started
        except psutil.NoSuchProcess:
            return True
