"""Paths that clients name: taken below configured folders only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rollout.errors import InvalidInputError


class AllowedPaths:
    """Folders below which a client may name files.

    Every link of a path is resolved before the path is checked, and the resolved path is returned:
    a link that is changed afterwards changes nothing. Users who may write below a root can still
    replace the files there.

    Errors name the folders, which are configured, and say the same of all that lies elsewhere,
    whether it exists or not.
    """

    def __init__(self, setting: str, folders: Sequence[str | os.PathLike[str]]) -> None:
        """``setting``: what in the configuration adds a folder, for errors. Relative paths of
        clients are taken below the first folder."""
        self._setting = setting
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def file(self, field: str, path: str) -> Path:
        """A regular file. Raises InvalidInputError naming ``field``."""
        found = self._resolved(field, path)
        if not os.path.isfile(found):
            raise InvalidInputError(field, path, "there is no such file")
        return found

    def new_folder(self, field: str, path: str) -> Path:
        """A folder to write, which need not exist. Raises InvalidInputError naming ``field``."""
        return self._resolved(field, path)

    def folder(self, field: str, path: str) -> Path:
        """A folder whose own entries do not lead elsewhere. Raises InvalidInputError."""
        found = self._resolved(field, path)
        if not os.path.isdir(found):
            raise InvalidInputError(field, path, "there is no such folder")
        with os.scandir(found) as entries:
            for entry in entries:
                if entry.is_symlink() and not self._holds(Path(os.path.realpath(entry.path))):
                    raise InvalidInputError(
                        field, path, f"its {entry.name} is a link that leads elsewhere"
                    )
                if not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
                    raise InvalidInputError(
                        field, path, f"its {entry.name} is neither a file nor a folder"
                    )
        return found

    def _resolved(self, field: str, path: str) -> Path:
        if not self._folders:
            raise InvalidInputError(
                field, path, f"no path is taken: the server was started without {self._setting}"
            )
        if not path or "\0" in path or ".." in Path(path).parts:
            raise InvalidInputError(field, path, "must be a path without '..'")
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise InvalidInputError(
                field, path, "must be text that the system can encode"
            ) from None
        found = Path(os.path.realpath(self._folders[0] / path))  # an absolute one stays as it is
        if not self._holds(found):
            folders = ", ".join(map(str, self._folders))
            raise InvalidInputError(
                field, path, f"must lead below {folders}; {self._setting} says so"
            )
        return found

    def _holds(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)
