"""Files that are there whole or not at all, under names that outlast a crash of the machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def scratch_file(path: Path) -> Path:
    """The path that `whole_file` writes to before it renames, unless it is shared."""
    return path.with_name(path.name + ".tmp")


SHARED_SCRATCH = ".saving."
"""The text between a file's name and a random number in the names of shared scratch files."""


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name when the block ends well and else is removed.

    After a crash the name stands for the old file or the new one.

    Args:
        shared: other processes may write this path meanwhile, so each has a scratch file of its
            own. A process that is killed leaves it there.
    """
    scratch = scratch_file(path)
    if shared:
        scratch = path.with_name(f"{path.name}{SHARED_SCRATCH}{secrets.token_hex(8)}")
    try:
        with scratch.open("wb") as file:
            yield file
        _sync(scratch, os.O_RDONLY)  # by its name: who wrote may have opened it anew
        scratch.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # the first error says more
            scratch.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
