"""A dataset job that is killed at random moments and resumed until it is complete."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.small_jobs import read_rows
from tests.soak.ledger import Event, Ledger

_SLOWEST_SECONDS = 900.0  # of one start of the job, whatever else the machine does
_POLL_SECONDS = 0.02
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal, and when: once the journal has grown by ``rows`` lines, or ``delay`` after start.

    SIGSTOP is followed by SIGCONT, as Ctrl-Z is by fg.
    """

    number: signal.Signals
    rows: int | None
    delay: float


class Job:
    """The command, run until it is complete, with kills in between."""

    def __init__(
        self, rng: random.Random, arguments: Sequence[str], folder: Path, ledger: Ledger
    ) -> None:
        self._rng, self._arguments, self._folder = rng, list(arguments), folder
        self._ledger = ledger
        self._process: subprocess.Popen | None = None
        self._cycle = 0

    @property
    def logs(self) -> list[Path]:
        return sorted(self._folder.glob("job*.log"))

    async def undisturbed(self) -> list[Row]:
        """Rows of a run that nobody kills, without speculation."""
        event = self._ledger.begin("job", "undisturbed")
        output = self._folder / "undisturbed.jsonl"
        code = await self._run(event, output, "none", None)
        self._ledger.require(code == 0, event, f"exit code {code}")
        return read_rows(output)

    async def run(self, expected: Sequence[Row]) -> None:
        """Cycle after cycle: a new output each, compared with ``expected`` when complete."""
        while True:
            self._cycle += 1
            suffix = self._rng.choice([".jsonl", ".parquet"])
            spec = self._rng.choice(["ngram", "ngram", "none"])
            output = self._folder / f"cycle{self._cycle}{suffix}"
            event = await self._until_complete(output, spec)
            rows = read_rows(output)
            self._ledger.count("job", f"complete as {suffix} by {spec}")
            self._ledger.require(
                rows == list(expected),
                event,
                f"{output.name} has other rows: {_first(rows, expected)}",
            )
            names = {path.name.removeprefix(output.name) for path in self._folder.glob("cycle*")}
            known = {"", ".run.json", ".corpus", ".corpus.learned.json"}
            self._ledger.require(names <= known, event, f"files left: {names}")
            if names <= known and rows == list(expected):
                for path in self._folder.glob("cycle*"):
                    path.unlink()

    async def _until_complete(self, output: Path, spec: str) -> Event:
        while True:
            kill = self._draw_kill() if self._rng.random() < 0.8 else None
            event = self._ledger.begin("job", kill.number.name if kill else "left alone")
            code = await self._run(event, output, spec, kill)
            self._ledger.count("job", f"{event.kind} ended by {code}")
            allowed = {0}
            if kill is not None and kill.number is not signal.SIGSTOP:
                allowed |= {-kill.number, 128 + kill.number}
            self._ledger.require(code in allowed, event, f"exit code {code} after {kill}")
            if code == 0:
                return event

    def _draw_kill(self) -> Kill:
        number = self._rng.choice(
            [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP]
        )
        rows = self._rng.choice([None, self._rng.randrange(1, 200)])
        return Kill(number, rows, self._rng.uniform(0, 12 if rows is None else 0.5))

    async def _run(self, event: Event, output: Path, spec: str, kill: Kill | None) -> int:
        """One start of the command; its exit code."""
        is_parquet = output.suffix == ".parquet"
        journal = output.with_name(f"{output.name}.partial.jsonl") if is_parquet else output
        corpus = (
            [] if spec == "none" else ["spec.corpus_bytes=1048576", "spec.calibration_seconds=0"]
        )
        command = [
            sys.executable, "-m", "rollout.cli", *self._arguments, f"output.path={output}",
            f"spec={spec}", *corpus, "output.corpus_seconds=0.5",
        ]  # fmt: skip
        log = self._folder / f"job{event.number:04d}.log"
        size = _lines_of(journal)
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        async with asyncio.timeout(_SLOWEST_SECONDS):
            if kill is not None:
                await self._strike(self._process, kill, journal, size)
            while self._process.poll() is None:
                await asyncio.sleep(_POLL_SECONDS)
        # Only a torn last line may go.
        kept = _lines_of(journal)
        is_done = is_parquet and output.exists()
        self._ledger.require(
            kept >= size or is_done, event, f"{size} rows before, {kept} afterwards"
        )
        return self._process.returncode

    async def _strike(
        self, process: subprocess.Popen, kill: Kill, journal: Path, size: int
    ) -> None:
        while kill.rows is not None and _lines_of(journal) < size + kill.rows:
            if process.poll() is not None:
                return
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(kill.delay)
        with suppress(ProcessLookupError):  # it was faster
            os.killpg(process.pid, kill.number)
            if kill.number is signal.SIGSTOP:
                await asyncio.sleep(2 * kill.delay)
                os.killpg(process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _lines_of(journal: Path) -> int:
    """Whole lines; 0 where there is no such file yet."""
    try:
        return journal.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _first(rows: Sequence[Row], expected: Sequence[Row]) -> str:
    """The first difference."""
    for row, known in zip(rows, expected, strict=False):
        if row != known:
            return f"{row} instead of {known}"
    return f"{len(rows)} rows instead of {len(expected)}"
