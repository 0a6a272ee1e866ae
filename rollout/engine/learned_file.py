"""The file of an engine's learned costs, beside its corpus. It decides speed alone."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rollout.engine.durable_files import whole_file

_MAX_BYTES = 64 << 20
"""The largest file read: twice what the lengths of all prompt groups take."""

_MAX_DEPTH = 12  # objects and lists inside each other: of a cost curve of another device, 8


def learned_file(corpus_path: str | os.PathLike[str]) -> Path:
    """The file beside a corpus's file that holds its learned costs."""
    return Path(f"{os.fspath(corpus_path)}.learned.json")


def save_learned(path: Path, learned: dict[str, Any]) -> None:
    """Write what was learned, whole or not at all, and as durably as the corpus. Raises OSError."""
    with whole_file(path, shared=True) as file:
        file.write(json.dumps(learned).encode())


def load_learned(path: Path) -> dict[str, Any]:
    """The objects that `save_learned` wrote, every number in them finite; none without a file.

    Raises ValueError for a file that is damaged, OSError for one that cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(content) > _MAX_BYTES:
        raise ValueError(f"must be at most {_MAX_BYTES} bytes")
    try:
        learned = json.loads(content.decode(), parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if not isinstance(learned, dict) or not all(isinstance(p, dict) for p in learned.values()):
        raise ValueError("must hold an object of objects")
    _check_depth(learned, _MAX_DEPTH)
    return learned


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _check_depth(value: dict[str, Any] | list[Any], max_depth: int) -> None:
    """Raise ValueError for what is too deeply nested to be copied and written again."""
    if not max_depth:
        raise ValueError("is nested too deep")
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, (dict, list)):
            _check_depth(each, max_depth - 1)
