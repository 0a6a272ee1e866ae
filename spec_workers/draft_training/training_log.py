"""The log of a training run: JSON lines, in the order of their steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError

LOG = "training.jsonl"

Record = dict[str, Any]


class TrainingLog:
    """Each record is in the operating system's hands when `write` returns."""

    def __init__(self, path: Path, resumed_steps: int = 0) -> None:
        """Goes on behind the records of the first ``resumed_steps`` steps; what follows them was
        logged by a run that did not save."""
        kept = read_log(path) if resumed_steps and path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        for record in kept:
            if record["step"] <= resumed_steps:
                self.write(record)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[Record]:
    """Its whole records. Raises InvalidInputError where it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise InvalidInputError("log", str(path), f"cannot be read: {error}") from None
