"""A local checkpoint that follows the versions that SkyRL's trainer publishes in a folder.

Version 0 is the checkpoint that the engine began with; ``delta-00000007/`` is what has changed from
version 6 to 7 (`published_delta`).

The folder ``.weight_sync`` in the local one holds a lock and ``state.json``, which names the
version and where it came from. That file is missing while a version is written, so whatever ends
the process then, the next call begins with a whole checkpoint again: applying a xor twice would
undo it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.checkpoint import Checkpoint, listed
from rollout.models.pulled_folder import LOCK, STATE, SYNC, pulls_held_off
from rollout.models.spec import read_json
from rollout.weights.published_delta import MANIFEST, Place, PublishedDelta, opened

_INDEX = "model.safetensors.index.json"
_SAMPLES, _SAMPLE = 16, 1 << 16  # of each file's bytes, for the digest


class LocalCheckpoint:
    """The checkpoint in ``folder``; ``base`` is version 0, ``source`` holds the published ones.

    A new version's files and their headers, not their values, are checked before the version that
    is there is given up.
    """

    def __init__(
        self,
        folder: Path,
        base: Path,
        source: Path,
        check: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """``check`` may raise for a version's folder, before it is read.

        Raises InvalidInputError for a folder with other contents, which a pull would remove.
        """
        field = "local_checkpoint_dir"
        self._folder, self._base, self._source = (
            Path(os.path.realpath(path)) for path in (folder, base, source)
        )
        self._check = check
        self._sync = self._folder / SYNC
        self._state = self._sync / STATE
        for name, other in (("the base", self._base), ("source_dir", self._source)):
            if self._folder.is_relative_to(other) or other.is_relative_to(self._folder):
                raise InvalidInputError(
                    field, str(folder), f"and {name}, {other}, lie in each other: name a new folder"
                )
        if self._sync.is_symlink():
            raise InvalidInputError(field, str(folder), f"its {SYNC} is a link: name a new folder")
        if self._folder.exists() and not self._sync.is_dir() and any(self._folder.iterdir()):
            raise InvalidInputError(field, str(folder), "holds something else: name a new folder")

    @property
    def version(self) -> int | None:
        """The version that is there whole; None: there is none."""
        if not self._state.exists():
            return None
        version = str(read_json(self._state).get("version"))
        if not (version.isascii() and version.isdigit()):
            raise CheckpointError(f"{self._state}: version={version!r}; remove {self._folder}")
        return int(version)

    def pull(self, target: int) -> None:
        """Bring the folder to version ``target``: from the one that is there, or from version 0.

        Waits for other pulls into it, and for those who load it. Raises CheckpointError for a
        version that is missing, damaged or of another base.
        """
        with self._locked(fcntl.LOCK_SH):  # where there is nothing to do, loads go on
            if self._current(target) == target:
                return
        with self._locked(fcntl.LOCK_EX):
            here = self._current(target)
            start = self._base if here is None else self._folder
            names = Checkpoint(start).tensors.keys()  # raises where a shard is missing
            versions = range((here or 0) + 1, target + 1)
            deltas = {each: PublishedDelta(self._published(each), each) for each in versions}
            for version, delta in deltas.items():
                if unknown := sorted(delta.checksums.keys() - names):
                    raise CheckpointError(
                        f"{self._folder_of(version)}: {listed(unknown)}: no tensors of {start}"
                    )
            if here is None:
                self._copy_base()
            for version, delta in deltas.items():
                identity = self._identity(version)
                places = _places(self._folder)
                self._give_up()
                delta.apply(places)
                for path in {path for path, *_ in places.values()}:
                    _to_disk(path)
                self._commit(identity)

    def _published(self, version: int) -> Path:
        """The folder of a version. Raises CheckpointError for one that is not there, and what the
        check raises."""
        if version == 0:
            return self._base
        folder = self._folder_of(version)
        if not os.path.lexists(folder):
            raise CheckpointError(f"{folder}: version {version} was not published")
        self._check(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: must be a folder")
        return folder

    def _folder_of(self, version: int) -> Path:
        return self._source / f"delta-{version:08d}"

    def _current(self, target: int) -> int | None:
        """The version to go on from; None: begin with a whole one."""
        version = self.version
        if version is None or version > target:
            return None
        found = read_json(self._state)
        if 0 < version < target and not os.path.lexists(self._folder_of(version)):
            origin = self._origin()  # older ones may be pruned
            return version if origin == {name: found.get(name) for name in origin} else None
        return version if found == self._identity(version) else None

    def _origin(self) -> dict[str, str]:
        return {"base": str(self._base), "source": str(self._source)}

    def _identity(self, version: int) -> dict[str, str]:
        """The fields of ``state.json``, which tell apart versions of one number of two runs."""
        digest = _digest(self._published(version))
        return {"version": f"{version:06d}", "digest": digest} | self._origin()

    def _copy_base(self) -> None:
        with pulls_held_off(self._base):
            identity = self._identity(0)
            self._give_up()
            files = {entry.name: entry for entry in os.scandir(self._base) if entry.is_file()}
            for entry in os.scandir(self._folder):
                if entry.is_file() and entry.name not in files:
                    os.remove(entry.path)
            for name, entry in files.items():
                copy = self._folder / name
                copy.unlink(missing_ok=True)  # a link would be written through
                shutil.copyfile(entry.path, copy)
                _to_disk(copy)
        _to_disk(self._folder)
        self._commit(identity)

    def _give_up(self) -> None:
        self._state.unlink(missing_ok=True)
        _to_disk(self._sync)

    def _commit(self, identity: Mapping[str, str]) -> None:
        new = self._state.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.write_text(json.dumps(identity))
        _to_disk(new)
        new.replace(self._state)
        _to_disk(self._sync)

    @contextmanager
    def _locked(self, mode: int) -> Iterator[None]:
        self._sync.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self._sync / LOCK, flags, 0o666)
        try:
            fcntl.flock(lock, mode)
            yield
        finally:
            os.close(lock)


def _to_disk(path: Path) -> None:
    """Make a file, or a folder's names, outlast a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(folder: Path) -> str:
    """SHA-256 of the indices, which have checksums where a version is a difference, and of each
    weight file its size, its header and samples of the rest."""
    digest = hashlib.sha256()
    indices = [path for name in (_INDEX, MANIFEST) if (path := folder / name).exists()]
    for path in [*indices, *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            start = size if path in indices else 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            digest.update(file.read(min(start, size, 100 << 20)))
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _places(folder: Path) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for path in folder.glob("*.safetensors"):
        with opened(path), path.open("rb") as file:  # opened: its header is checked
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                found[name] = (path, 8 + length + start, end - start)
    return found
