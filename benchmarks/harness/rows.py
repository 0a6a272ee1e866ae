"""Rows of figures: a table, and a file of JSON lines that grows as rows come.

A row that could not be measured has neither a value nor an answer to `ok`. The file gets each row
as soon as there is one, behind the lines it holds: a process that is killed loses at most the line
it was writing. Lines between two `{"stage": ...}` marks of `gpu_session.py` are rows of the first
mark's stage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(kw_only=True, slots=True)
class Row:
    """One figure. ``bar`` is the least (or, with ``at_most``, the largest) value that is good."""

    name: str
    value: float | None
    unit: str
    bar: float | None = None
    ok: bool | None = True


def row(
    name: str, value: float, unit: str, bar: float | None = None, *, at_most: bool = False
) -> Row:
    good = bar is None or (value <= bar if at_most else value >= bar)
    return Row(name=name, value=round(value, 4), unit=unit, bar=bar, ok=good)


def not_run(name: str, unit: str, bar: float | None = None) -> Row:
    return Row(name=name, value=None, unit=unit, bar=bar, ok=None)


def show(title: str, rows: Iterable[Row]) -> None:
    # A session imports this module on a bare machine, before rich is installed.
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "value", "unit", "bar", "", title=title)
    for entry in rows:
        bar = "" if entry.bar is None else f"{entry.bar:g}"
        value = "" if entry.value is None else f"{entry.value:,.3f}"
        verdict = {True: "", False: "missed", None: "not run"}[entry.ok]
        table.add_row(entry.name, value, entry.unit, bar, verdict)
    Console(width=110).print(table)


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one line in one write; behind a torn line it goes on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a torn one is reported and left out. Nothing where there is no file."""
    found = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except ValueError:
            print(f"{path}, line {number}: torn, and left out", flush=True)
    return found
