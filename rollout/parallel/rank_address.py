"""The process that a rank is, as other ranks of its host can look for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """A process: its host, as far as process ids mean the same, its id and when it started."""

    host: str
    pid: int
    started: int | None  # clock ticks since boot, which setting the host's clock does not change

    @classmethod
    def here(cls) -> Self:
        """This process."""
        kernel, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
        host = ""  # not Linux: nobody can look
        if kernel.exists():
            host = f"{kernel.read_text().strip()}/{os.readlink(namespace)}"
        return cls(host=host, pid=os.getpid(), started=_start_ticks(os.getpid()))

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
        return self._is_seen_from(here) and _start_ticks(self.pid) != self.started

    def described(self, here: RankAddress) -> str:
        """The process in words, and whether it is suspended as far as ``here`` can see it."""
        if not self._is_seen_from(here):
            return f"process {self.pid} of another host"
        is_stopped = _stat(self.pid)[:1] in ([b"T"], [b"t"])
        return f"process {self.pid}{', which is suspended' if is_stopped else ''}"

    def _is_seen_from(self, here: RankAddress) -> bool:
        return bool(self.host) and self.host == here.host


def _start_ticks(pid: int) -> int | None:
    """Clock ticks from the boot to the start of a process; None for one that has ended."""
    state, *fields = _stat(pid) or [b"X"]
    return None if state in (b"Z", b"X") else int(fields[18])


def _stat(pid: int) -> list[bytes]:
    """What Linux tells of a process: its state first. Empty for one that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
