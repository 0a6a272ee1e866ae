"""What an engine learned beside its corpus, in a file of its own. It decides speed alone."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from rollout.durable import sync_folder


def learned_file(corpus_path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(corpus_path)}.learned.json")


def save_learned(path: Path, learned: dict[str, Any]) -> None:
    """Whole or not at all, and durable like the corpus it is of. Raises OSError."""
    temporary = path.with_name(f"{path.name}.saving.{secrets.token_hex(8)}")
    try:
        with temporary.open("w") as file:
            file.write(json.dumps(learned))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def load_learned(path: Path) -> dict[str, Any]:
    """Nothing where there is no such file.

    Raises ValueError for one that is damaged, OSError for one that cannot be read.
    """
    try:
        learned = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(learned, dict) or not all(isinstance(p, dict) for p in learned.values()):
        raise ValueError("must hold an object of objects")
    return learned
