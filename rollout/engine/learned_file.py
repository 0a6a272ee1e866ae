"""The file of the lengths of rollouts beside a corpus. It decides speed alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rollout.engine.durable_files import whole_file

_MAX_BYTES = 64 << 20
"""The largest file read: twice what the lengths of all prompt groups take."""


def learned_file(corpus_path: str | os.PathLike[str]) -> Path:
    """The file beside a corpus's file that holds the lengths of rollouts."""
    return Path(f"{os.fspath(corpus_path)}.learned.json")


def save_learned(path: Path, learned: dict[str, Any]) -> None:
    """Write what was learned, whole or not at all, and as durably as the corpus. Raises OSError."""
    with whole_file(path, shared=True) as file:
        file.write(json.dumps(learned).encode())


def load_learned(path: Path) -> dict[str, Any]:
    """The objects that `save_learned` wrote; none without a file.

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
        learned = json.loads(content.decode())
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if not isinstance(learned, dict):
        raise ValueError("must hold an object")
    return learned
