"""What every benchmark ends with: rows `{name, value, unit, bar, ok}`, a table and a JSON file.

What could not be run here has neither a value nor an answer to `ok`. A file whose name ends in
`.jsonl` gets each row as it comes, behind what it holds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import row_file
from rich.console import Console
from rich.table import Table


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


def parser(description: str) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument(
        "--json",
        type=Path,
        help="also write the rows to this file; .jsonl: append each as it comes",
    )
    return arguments


class _Streamed(list[Row]):
    """Rows that are in a file as soon as they are in the list."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, entry: Row) -> None:
        super().append(entry)
        row_file.append(self._path, asdict(entry))

    def extend(self, entries: Iterable[Row]) -> None:
        for entry in entries:
            self.append(entry)


@contextmanager
def finishing(title: str, json_path: Path | None) -> Iterator[list[Row]]:
    """A list for rows; what it holds is shown and written however the block ends."""
    if json_path is not None and json_path.suffix == ".jsonl":
        rows: list[Row] = _Streamed(json_path)
    else:
        rows = []
    try:
        yield rows
    finally:
        finish(title, rows, json_path)


def finish(title: str, rows: list[Row], json_path: Path | None) -> None:
    table = Table("name", "value", "unit", "bar", "", title=title)
    for entry in rows:
        bar = "" if entry.bar is None else f"{entry.bar:g}"
        value = "" if entry.value is None else f"{entry.value:,.3f}"
        verdict = {True: "", False: "missed", None: "not run"}[entry.ok]
        table.add_row(entry.name, value, entry.unit, bar, verdict)
    Console(width=110).print(table)
    if json_path is None or isinstance(rows, _Streamed):
        return
    if json_path.suffix == ".jsonl":
        _Streamed(json_path).extend(rows)
        return
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps([asdict(entry) for entry in rows], indent=1) + "\n")
