"""Names that outlast a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def replace_durably(scratch: Path, path: Path) -> None:
    """Give a finished file its name. After a crash the name stands for the old file or the new."""
    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    scratch.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A new name is durable once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
