"""Names that outlast a crash of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def scratch_file(path: Path) -> Path:
    """The path that `whole_file` writes to before it renames."""
    return path.with_name(path.name + ".tmp")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name when the block ends well and else is removed."""
    scratch = scratch_file(path)
    try:
        with scratch.open("wb") as file:
            yield file
        replace_durably(scratch, path)
    except BaseException:
        with suppress(OSError):  # the first error says more
            scratch.unlink(missing_ok=True)
        raise


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
