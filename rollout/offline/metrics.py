"""Writes what a run has to tell where people look: lines of JSON, and TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError, RolloutError


class MetricsError(RolloutError):
    """Counters cannot be written."""


class JsonlLog:
    """Lines of ``{"kind": "step", "time": <Unix seconds>, ...}``; goes on with a file.

    A line is handed to the operating system whole, so a killed process leaves at most its last one
    torn; whoever goes on with the file begins a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_inside_a_line(path)
            self._file = path.open("ab", buffering=0)  # readers see each line at once
        except OSError as error:
            raise self._error(error) from None
        if torn:
            self._append(b"\n")

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add a line. What JSON has no number for (NaN, infinity) becomes null."""
        line = {"kind": kind, "time": time.time(), **values}
        self._append((_to_json(line) + "\n").encode())

    def close(self) -> None:
        self._file.close()

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> MetricsError:
        return MetricsError(
            f"log.jsonl={str(self._path)!r} cannot be written: {error.strerror}. Give another "
            "path or none; finished rollouts are safe"
        )


class TensorBoardMetrics:
    """Scalars named ``rollout/<counter>`` as TensorBoard event files in a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InvalidInputError(
                "log.tensorboard",
                str(folder),
                "needs the package tensorboard: pip install 'specrollout[metrics]'",
            ) from None
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"rollout/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


def _ends_inside_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _to_json(line: Mapping[str, Any]) -> str:
    try:
        return json.dumps(line, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(line), allow_nan=False)


def _without_nan(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {name: _without_nan(each) for name, each in value.items()}
        case list() | tuple():
            return [_without_nan(each) for each in value]
        case _:
            return value
