"""The content of a file as it is read once, whatever becomes of the file afterwards."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from rollout.errors import InvalidInputError
from rollout.offline.sink import OutputError

_CHUNK_BYTES = 1 << 20


class Snapshot:
    """A copy in a file without a name: nobody else can change it, and it goes with the process.

    A lock would not do, for writers need not heed one; nor would one open descriptor, for files
    are also rewritten in place.
    """

    def __init__(self, field: str, path: Path, folder: Path) -> None:
        """Copy ``path`` to the disk that holds ``folder``.

        Raises InvalidInputError naming ``field`` for a file that cannot be read, OutputError for a
        folder that cannot hold the copy.
        """
        digest = hashlib.sha256()
        try:
            with ExitStack() as undo:
                self._copy = undo.enter_context(tempfile.TemporaryFile(dir=folder))
                for chunk in _chunks(field, path):
                    digest.update(chunk)
                    self._copy.write(chunk)
                self._copy.flush()
                undo.pop_all()
        except OSError as error:
            raise OutputError(
                f"{folder} cannot hold a copy of {path}, which the job reads in its place: "
                f"{error.strerror}. Make room, or give another output.path"
            ) from None
        self.sha256 = digest.hexdigest()

    def open(self) -> BinaryIO:
        """A reader with a position of its own."""
        return cast(BinaryIO, io.BufferedReader(_Reader(self._copy.fileno())))

    def close(self) -> None:
        self._copy.close()


class _Reader(io.RawIOBase):
    """Reads a descriptor that others read too, and leaves it open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        count = os.preadv(self._descriptor, [buffer], self._position)
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = os.fstat(self._descriptor).st_size
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: size}[whence]
        self._position = start + offset
        return self._position


def _chunks(field: str, path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise InvalidInputError(field, str(path), f"cannot be read: {error.strerror}") from None
