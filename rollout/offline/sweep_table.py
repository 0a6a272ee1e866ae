"""The jobs of a sweep beside each other, in one table at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollout.offline.job import JobResult, JobStatus


@dataclass(frozen=True, slots=True)
class _Row:
    overrides: Sequence[str]
    result: JobResult | None  # None: it failed


class SweepTable:
    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def add(self, overrides: Sequence[str], result: JobResult | None) -> None:
        """The next job: what its command line says, and its result; None where it failed."""
        self._rows.append(_Row(overrides, result))

    def print(self, console: Console) -> None:
        """A line per job, named by what is not the same in all; nothing where there is one."""
        if len(self._rows) < 2:
            return
        common = set(self._rows[0].overrides).intersection(*(row.overrides for row in self._rows))
        table = Table(title="jobs of the sweep", title_justify="left")
        table.add_column("job", overflow="fold")
        for name in ("rollouts", "tokens/s", "accept length"):
            table.add_column(name, justify="right")
        table.add_column("output", overflow="fold")
        for index, row in enumerate(self._rows):
            own = [each for each in row.overrides if each not in common]
            table.add_row(" ".join(own) or str(index), *_cells(row.result))
        console.print(table)


def _cells(result: JobResult | None) -> tuple[str, str, str, str]:
    if result is None:
        return "failed", "", "", ""
    summary, here = result.summary, Path.cwd()
    output = result.output
    shown = str(output.relative_to(here) if output.is_relative_to(here) else output)
    if summary is None:
        return result.status.value, "", "", shown
    stopped = ", stopped" if result.status is JobStatus.STOPPED else ""
    return (
        f"{summary.rollouts + summary.resumed:,}{stopped}",
        f"{summary.tokens_per_second:,.0f}",
        f"{summary.metrics.accept_length:.3f}",
        shown,
    )
