"""Question: what have all calls of `gpu_session.py` measured together, and what is still to be run?

    python3 benchmarks/gpu_merge.py FOLDER... --json session.json

One table of all rows with their bars. Of rows of one name the newest counts, and one that was
measured before one that was not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpu_session import OK, ROWS
from gpu_stages import stages
from harness.rows import Row, finish, read_records

_FIELDS = {field.name for field in fields(Row)}


def merged(folders: Sequence[Path]) -> tuple[list[Row], dict[str, str]]:
    """Rows by the order in which they first came; and each stage's best status."""
    found: list[tuple[float, dict[str, Any]]] = []
    statuses: dict[str, str] = {}
    for folder in folders:
        now = 0.0
        for record in read_records(folder / ROWS):
            if "stage" in record:
                now = record["time"]
                if statuses.get(record["stage"]) != OK:
                    statuses[record["stage"]] = record["status"]
            elif record.keys() >= _FIELDS:
                found.append((now, record))
    newest: dict[str, dict[str, Any]] = {}
    for _, record in sorted(found, key=lambda each: each[0]):
        if record["value"] is not None or record["name"] not in newest:
            newest[record["name"]] = record
    return [Row(**{key: record[key] for key in _FIELDS}) for record in newest.values()], statuses


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows too")
    options = arguments.parse_args(arguments_given)
    for folder in options.folders:
        if not (folder / ROWS).is_file():
            arguments.error(f"{folder}: has no {ROWS}")
    rows, statuses = merged(options.folders)
    finish("sessions on a GPU", rows, options.json)
    missing = [stage.name for stage in stages() if statuses.get(stage.name) != OK]
    for name in missing:
        print(f"missing: {name} ({statuses.get(name, 'never asked for')})")
    if missing:
        print("--stage", *missing)


if __name__ == "__main__":
    main()
