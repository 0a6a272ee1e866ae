"""Rows in a file of one JSON object a line, appended as they come.

Lines between two `{"stage": ...}` marks are rows of the first one's stage. A process that is killed
loses at most the line that it was writing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(path: Path, record: dict[str, Any]) -> None:
    """One line, in one write; after a line that was torn, on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a torn one is told and left out. Nothing where there is no file."""
    found = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            print(f"{path}, line {number}: torn, and left out", flush=True)
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
