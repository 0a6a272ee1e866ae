"""Writes counters, one flat set of numbers per step, where people look at them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rollout.errors import InvalidInputError, RolloutError


class MetricsError(RolloutError):
    """Counters cannot be written."""


class MetricsWriter(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlMetrics:
    """One line per step: ``{"step": 3, "time": <Unix seconds>, ...}``; goes on with a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # readers see each line at once
        except OSError as error:
            raise self._error(error) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, "time": time.time(), **values}) + "\n"
        try:
            self._file.write(line.encode())
        except OSError as error:
            raise self._error(error) from None

    def close(self) -> None:
        self._file.close()

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
