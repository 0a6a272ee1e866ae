"""One process writes one output."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout.offline.sink import OutputError


def lock_file(output: Path) -> Path:
    return output.with_name(output.name + ".lock")


class OutputLock:
    """Holds `<output>.lock` for as long as the context lasts; the system frees it with the process.

    The file is removed under the lock, so whoever opened it before must look whether the name
    still stands for the file that it locked.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._path = lock_file(output)
        self._file = -1

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while not self._acquired():
                os.close(self._file)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise OutputError(f"{self._path} cannot be written: {error.strerror}") from None
        return self

    def _acquired(self) -> bool:
        self._file = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 20, 0).decode(errors="replace") or "unknown"
            os.close(self._file)
            raise OutputError(
                f"{self._output} is being written by another job (process {owner}): wait for it, "
                "or choose another output.path"
            ) from None
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._file), named)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # a file that nobody holds locked hinders nobody
            self._path.unlink(missing_ok=True)
        os.close(self._file)
