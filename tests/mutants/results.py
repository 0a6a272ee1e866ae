"""Outcomes of mutants: caught, survived, left out."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutants.mutation import Mutation

Key = tuple[str, str, int, str, int]


class Outcome(enum.StrEnum):
    CAUGHT = "caught"
    SURVIVED = "survived"
    NOT_BUILT = "not built"  # C++ that does not compile is no mutant


@dataclass(frozen=True, slots=True)
class Result:
    mutation: Mutation
    outcome: Outcome
    test: str  # that caught it
    num_files: int  # test files that were chosen
    num_covering: int  # those that run the mutated statement
    seconds: float
    cpu_seconds: float  # of the tests
    diff: str

    @property
    def line(self) -> str:
        place = f"{self.mutation.file}:{self.mutation.edit.line}"
        asked = f"{self.num_files} of {self.num_covering} files"
        return f"{self.outcome:9} {self.seconds:6.1f} s, {asked}: {place} {self.test}"


def print_results(results: Sequence[Result]) -> None:
    """A table by room, then each survivor with its line and what was changed."""
    console = Console()
    counts = Counter((result.mutation.room, result.outcome) for result in results)
    table = Table("room", *Outcome)
    for room in sorted({room for room, _ in counts}):
        table.add_row(room, *(str(counts[room, outcome]) for outcome in Outcome))
    totals = Counter(result.outcome for result in results)
    table.add_section()
    table.add_row("all", *(str(totals[outcome]) for outcome in Outcome))
    for result in results:
        if result.outcome is Outcome.SURVIVED:
            print(result.line, result.diff, sep="\n")
    console.print(table)
    seconds = sum(result.seconds for result in results)
    cpu_seconds = sum(result.cpu_seconds for result in results)
    count = max(1, len(results))
    print(
        f"{seconds:.0f} s, {seconds / count:.1f} s a mutant; {cpu_seconds / count:.1f} s of a core"
    )


def write_results(path: Path, results: Sequence[Result]) -> None:
    rows = [
        {
            "room": result.mutation.room,
            "key": result.mutation.key,
            "outcome": result.outcome,
            "line": result.mutation.edit.line,
            "diff": result.diff,
            "test": result.test,
            "files": result.num_files,
            "covering": result.num_covering,
            "seconds": round(result.seconds, 1),
            "cpu_seconds": round(result.cpu_seconds, 1),
        }
        for result in results
    ]
    path.write_text(json.dumps(rows, indent=1))


def read_results(path: Path) -> dict[Key, Outcome]:
    """By key; what did not compile is left out."""
    rows = json.loads(path.read_text())
    found = {tuple(row["key"]): Outcome(row["outcome"]) for row in rows}
    return {key: outcome for key, outcome in found.items() if outcome is not Outcome.NOT_BUILT}
