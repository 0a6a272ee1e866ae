"""Counts of all that a soak did, and its violations."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Event:
    """One thing a stream of events does. ``number`` counts within its stream, from 1."""

    stream: str
    number: int
    kind: str

    def __str__(self) -> str:
        return f"{self.stream} {self.number} ({self.kind})"


class Ledger:
    """Counts events and outcomes, keeps violations, and writes all of it to a file as it comes."""

    def __init__(self, seed: int, log: Path) -> None:
        self.seed = seed
        self.violations: list[str] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._numbers: Counter[str] = Counter()
        self._started = time.monotonic()
        self._log = log.open("w", buffering=1)

    def begin(self, stream: str, kind: str) -> Event:
        """The stream's next event."""
        self._numbers[stream] += 1
        event = Event(stream, self._numbers[stream], kind)
        self.count(stream.rstrip("0123456789"), kind)
        self._write(str(event))
        return event

    def count(self, group: str, outcome: str, times: int = 1) -> None:
        self._counts[group, outcome] += times

    def require(self, holds: bool, event: Event, text: str) -> None:
        """Note a violation unless it holds."""
        if not holds:
            self.violations.append(f"seed {self.seed}, {event}: {text}")
            self._write(f"VIOLATION {event}: {text}")

    def print(self, console: Console) -> None:
        table = Table("stream", "what", "times")
        for (group, outcome), times in sorted(self._counts.items()):
            table.add_row(group, outcome, str(times))
        console.print(table)
        for violation in self.violations:
            console.print(violation, markup=False, highlight=False, soft_wrap=True)
        console.print(f"seed {self.seed}: {len(self.violations)} violations")

    def close(self) -> None:
        self._log.close()

    def _write(self, text: str) -> None:
        self._log.write(f"{time.monotonic() - self._started:9.2f} {text}\n")
