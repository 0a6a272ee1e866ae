"""A checkpoint folder that `rollout.weights.local_checkpoint` writes to, as its readers see it.

Its folder ``.weight_sync`` holds a lock, shared by readers and exclusive to a pull, and
``state.json``, which is missing from a pull's first write until its last.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout.errors import CheckpointError

SYNC, STATE, LOCK = ".weight_sync", "state.json", "lock"


def refuse_half_pulled(folder: Path) -> None:
    """Raises CheckpointError for a folder that is being written, or was left so."""
    if (folder / SYNC).is_dir() and not (folder / SYNC / STATE).exists():
        raise CheckpointError(f"{folder}: a pull into it has not ended; pull again")


@contextmanager
def pulls_held_off(folder: Path) -> Iterator[None]:
    """Holds off pulls into ``folder`` while it is read; nothing for a folder without any.

    Never waits. Raises CheckpointError while a pull is under way, and for a half of one.
    """
    lock = folder / SYNC / LOCK
    if not lock.is_file():
        refuse_half_pulled(folder)
        yield
        return
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder}: a pull into it is under way; load it when that has ended"
            ) from None
        refuse_half_pulled(folder)
        yield
