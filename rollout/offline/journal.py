"""Durable writing of JSON lines: what was appended survives a kill, and a disk that fills up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.engine.durable_files import sync_folder, whole_file
from rollout.errors import OutputError


class Journal:
    """Appends lines to a file; each is whole in the operating system's hands when append returns.

    A killed process therefore loses nothing. A power cut loses at most the last ``sync_seconds``:
    fsync is paid no more often. When the disk is full the torn line is cut off again, so the file
    stays a sequence of whole lines.
    """

    def __init__(self, path: Path, end: int = 0, *, sync_seconds: float = 1.0) -> None:
        """Go on at byte ``end``, after the last whole line; what follows is cut off."""
        self.path = path
        self.end = end
        self._sync_seconds = sync_seconds
        self._synced_at = time.monotonic()
        self._failed = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._file, end)
            sync_folder(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from None

    def append(self, line: bytes) -> int:
        """Write one line, newline included; the offset it begins at.

        Raises OutputError, and does nothing, where others have changed or moved the file.
        """
        self._require_unchanged()
        start, rest = self.end, memoryview(line)
        try:
            while rest:
                rest = rest[os.pwrite(self._file, rest, start + len(line) - len(rest)) :]
            self.end += len(line)
            if time.monotonic() - self._synced_at >= self._sync_seconds:
                self._sync()
        except OSError as error:
            self._failed = True
            with suppress(OSError):  # then the next run cuts the torn line off
                os.ftruncate(self._file, self.end)
            raise cannot_write(self.path, error) from None
        return start

    def close(self) -> None:
        """Raises OutputError where lines may be lost, unless append() has said so."""
        try:
            if not self._failed:
                self._sync()
                self._require_unchanged()
        except OSError as error:
            raise cannot_write(self.path, error) from None
        finally:
            os.close(self._file)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced_at = time.monotonic()

    def _require_unchanged(self) -> None:
        try:
            own, named = os.fstat(self._file), self.path.stat()
        except OSError:  # nothing has that name any more
            is_own = False
        else:
            is_own = os.path.samestat(own, named) and own.st_size == self.end
        if not is_own:
            self._failed = True
            raise OutputError(
                f"{self.path} was changed or moved by another process while it was written: put "
                "it back, or choose another output.path, and run the same command again"
            )


def whole_rows(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(start, end, row) of each row, up to a torn tail: bytes half written when a process died.

    Raises OutputError where something that is no row has rows after it.
    """
    torn: int | None = None
    with path.open("rb") as file:
        end = 0
        for number, line in enumerate(file, start=1):
            start, end = end, end + len(line)
            row = _parse(line)
            if row is None:
                torn = torn or number
            elif torn is not None:
                raise OutputError(
                    f"{path}: line {torn} is not a row of a rollout, and rows follow it: repair "
                    "the file, choose another output.path, or start anew with "
                    "output.overwrite=true"
                )
            else:
                yield start, end, row


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or, if anything fails, as it was."""
    try:
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> OutputError:
    """The error for a file that cannot be written, and what to do."""
    return OutputError(
        f"{path} cannot be written: {error.strerror or error}. What was written before is whole; "
        "make room or give another output.path, and run the same command again to go on"
    )
