"""A local checkpoint that follows the versions a trainer publishes in a folder.

slime's trainer writes ``weight_v000007/`` for version 7: a whole checkpoint folder, or what has
changed since version 6, each tensor's bytes xor-ed or overwritten, compressed with zstd, beside a
checksum of what it must become. Version 0 is the checkpoint that the engine began with.

The folder ``.weight_sync`` in the local one holds a lock and ``state.json``, which names the
version. That file is missing while a version is written, so whatever ends the process then, the
next call begins with a whole checkpoint again: applying a xor twice would undo it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.spec import read_json

_SYNC = ".weight_sync"
_INDEX = "model.safetensors.index.json"
Places = Mapping[str, tuple[Path, int, int]]
"""By tensor: its file, the offset of its first byte, how many it has."""


def refuse_half_pulled(folder: Path) -> None:
    """Raises CheckpointError for a local checkpoint that is being written, or was left so."""
    if (folder / _SYNC).is_dir() and not (folder / _SYNC / "state.json").exists():
        raise CheckpointError(f"{folder}: a pull into it has not ended; pull again")


class LocalCheckpoint:
    """The checkpoint in ``folder``; ``base`` is version 0, ``source`` holds the published ones."""

    def __init__(self, folder: Path, base: Path, source: Path) -> None:
        """Raises InvalidInputError for a folder with other contents, which a pull would remove."""
        self._folder, self._base, self._source = folder, base, source
        self._sync = folder / _SYNC
        self._state = self._sync / "state.json"
        if folder.exists() and not self._sync.is_dir() and any(folder.iterdir()):
            raise InvalidInputError(
                "local_checkpoint_dir", str(folder), "holds something else: name a new folder"
            )

    @property
    def version(self) -> int | None:
        """The version that is there whole; None: there is none."""
        return int(read_json(self._state)["version"]) if self._state.exists() else None

    def pull(self, target: int) -> None:
        """Bring the folder to version ``target``: from the last whole one, by the differences.

        Raises CheckpointError for a version that is missing, damaged or of another base.
        """
        with self._locked():
            here = self.version
            if here is not None and here > target:  # of an earlier run
                here = None
            start = target
            while start > (here or 0) and self._difference(start):
                start -= 1
            if here is None or start > here:
                self._copy(self._base if start == 0 else self._version_folder(start), start)
                here = start
            for version in range(here + 1, target + 1):
                self._apply(version)

    def _version_folder(self, version: int) -> Path:
        return self._source / f"weight_v{version:06d}"

    def _difference(self, version: int) -> dict[str, Any] | None:
        """What a version's index says of the difference that it is; None for a whole one."""
        folder = self._version_folder(version)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: version {version} was not published")
        index = folder / _INDEX
        found = read_json(index).get("metadata", {}) if index.exists() else {}
        return found if "delta_encoding" in found else None

    def _copy(self, source: Path, version: int) -> None:
        self._state.unlink(missing_ok=True)
        files = {entry.name: entry for entry in os.scandir(source) if entry.is_file()}
        for entry in os.scandir(self._folder):
            if entry.is_file() and entry.name not in files:
                os.remove(entry.path)
        for name, entry in files.items():
            copy = self._folder / name
            copy.unlink(missing_ok=True)  # a link would be written through
            shutil.copyfile(entry.path, copy)
        self._commit(version)

    def _apply(self, version: int) -> None:
        folder, difference = self._version_folder(version), self._difference(version)
        assert difference is not None
        known = {"version": version, "base_version": version - 1}
        found = {name: int(difference.get(name, -1)) for name in known}
        if found != known:
            raise CheckpointError(f"{folder}: its index says {found}, it must be {known}")
        apply = _encoding(folder, difference)
        checksum = _checksum(folder, difference.get("checksum_format"))
        places = _places(self._folder)
        self._state.unlink()
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="np") as opened:
                checksums = opened.metadata() or {}
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    if name not in places:
                        raise CheckpointError(f"{file}: {name} is no tensor of {self._folder}")
                    path, start, size = places[name]
                    values = np.memmap(path, np.uint8, "r+", start, (size,))
                    apply(values, opened.get_tensor(name).tobytes(), f"{file}: {name}")
                    if checksum(values) != checksums.get(name):
                        raise CheckpointError(
                            f"{file}: {name} has another checksum than its trainer's"
                        )
                    values.flush()
        self._commit(version)

    def _commit(self, version: int) -> None:
        new = self._state.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"version": f"{version:06d}"}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._state)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._sync.mkdir(parents=True, exist_ok=True)
        with (self._sync / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _places(folder: Path) -> Places:
    found: dict[str, tuple[Path, int, int]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                found[name] = (path, 8 + length + start, end - start)
    return found


Apply = Callable[[np.ndarray, bytes, str], None]


def _encoding(folder: Path, difference: Mapping[str, Any]) -> Apply:
    if difference.get("compression_format") != "zstd":
        raise CheckpointError(
            f"{folder}: compression_format={difference.get('compression_format')!r}; zstd is read"
        )
    encodings: dict[str, Apply] = {"xor": _apply_xor, "overwrite": _apply_overwrite}
    encoding = difference["delta_encoding"]
    if encoding not in encodings:
        raise CheckpointError(f"{folder}: delta_encoding={encoding!r}; {set(encodings)} are read")
    return encodings[encoding]


def _apply_xor(values: np.ndarray, data: bytes, where: str) -> None:
    difference = _decompressed(data, values.size, where)
    if difference.size != values.size:
        raise CheckpointError(f"{where} has {difference.size} bytes, it must be {values.size}")
    values ^= difference


def _apply_overwrite(values: np.ndarray, data: bytes, where: str) -> None:
    """A count, so many places, the bytes that stand there now."""
    found = _decompressed(data, 4 + 5 * values.size, where)
    count = int(found[:4].view("<u4")[0]) if found.size >= 4 else -1
    if found.size != 4 + 5 * count:
        raise CheckpointError(f"{where} has {found.size} bytes for {count} places")
    places = found[4 : 4 + 4 * count].view("<u4")
    if count and int(places.max()) >= values.size:
        raise CheckpointError(f"{where} changes byte {places.max()} of {values.size}")
    values[places] = found[4 + 4 * count :]


def _decompressed(data: bytes, most: int, where: str) -> np.ndarray:
    """At most so many bytes, which the frame says beforehand."""
    try:
        import zstandard
    except ImportError:
        raise CheckpointError(f"{where} is compressed: pip install 'specrollout[pull]'") from None
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= most:
            raise CheckpointError(f"{where} says {size} bytes, it must be 0 to {most}")
        found = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
    return np.frombuffer(found, np.uint8)


def _checksum(folder: Path, algorithm: object) -> Callable[[np.ndarray], str]:
    with suppress(ImportError):
        match algorithm:
            case "adler32":
                return lambda values: f"{zlib.adler32(values.data):08x}"
            case "xxh3-128":
                from xxhash import xxh3_128_hexdigest

                return lambda values: xxh3_128_hexdigest(values.data)
            case "blake3":
                from blake3 import blake3

                return lambda values: blake3(values.data).hexdigest()
        raise CheckpointError(
            f"{folder}: checksum_format={algorithm!r}; adler32, xxh3-128 and blake3 are read"
        )
    raise CheckpointError(
        f"{folder}: {algorithm} is not installed: pip install 'specrollout[pull]'"
    )
