"""A version of the weights in a folder: a whole checkpoint, or what has changed since the last."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from rollout.errors import CheckpointError
from rollout.models.checkpoint import Checkpoint, listed
from rollout.models.spec import read_json

_INDEX = "model.safetensors.index.json"
_MANIFEST = "manifest.json"  # SkyRL's index of a difference
_SAMPLES, _SAMPLE = 16, 1 << 16  # of each file's bytes, for the digest

Place = tuple[Path, int, int]
"""Where a tensor lies: its file, the offset of its first byte, how many it has."""


class PublishedVersion:
    """The folder of a version; of a difference the index says in ``metadata`` how it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checksums: Mapping[str, str] | None = None  # None: each file has its tensors'
        index = folder / _INDEX
        if (folder / _MANIFEST).exists():
            self._read_manifest(folder / _MANIFEST)
            return
        values = read_json(index) if index.exists() else {}
        self._metadata = values.get("metadata") or {}
        self._weight_map = values.get("weight_map")
        if not isinstance(self._metadata, dict):
            raise CheckpointError(f"{index}: metadata must be an object")

    def _read_manifest(self, path: Path) -> None:
        values = read_json(path)
        try:
            tensors = {each["name"]: each for each in values["tensors"]}
            algorithms = {each["checksum_algorithm"] for each in tensors.values()}
            self._weight_map = {name: each["payload_file"] for name, each in tensors.items()}
            self._checksums = {name: each["checksum"] for name, each in tensors.items()}
            versions = {name: values[name] for name in ("version", "base_version")}
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: is not what SkyRL writes: {error!r}") from error
        self._metadata = versions | {
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": algorithms.pop() if len(algorithms) == 1 else "xxh3-128",
        }

    @property
    def is_difference(self) -> bool:
        return "delta_encoding" in self._metadata

    def digest(self) -> str:
        """SHA-256 of the index, and of each file its size, its start and samples of the rest.

        The start of a difference's file has the checksums of all that it makes.
        """
        digest = hashlib.sha256()
        indices = [self.folder / name for name in (_INDEX, _MANIFEST)]
        for path in [*indices, *sorted(self.folder.glob("*.safetensors"))]:
            if not path.exists():
                continue
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

    def check_whole(self) -> None:
        """Raises CheckpointError unless every shard is there with all that the index names."""
        Checkpoint(self.folder)
        for file in self.folder.glob("*.safetensors"):
            total = re.search(r"-of-(\d+)\.safetensors$", file.name)
            if self._weight_map is None and total and int(total[1]) > 1:
                raise CheckpointError(f"{file} is one of {int(total[1])}, and there is no {_INDEX}")

    def difference(self, version: int) -> Difference:
        """The change from the version before to this one.

        Raises CheckpointError if not all is there, or it is of another version.
        """
        known = {"version": version, "base_version": version - 1}
        found = {name: _integer(self._metadata.get(name, -1)) for name in known}
        if found != known:
            raise CheckpointError(f"{self.folder}: its index says {found}, it must be {known}")
        if not isinstance(self._weight_map, dict):
            raise CheckpointError(f"{self.folder / _INDEX}: weight_map is missing")
        return Difference(self.folder, self._metadata, self._weight_map, self._checksums)


class Opened(Protocol):
    """An open safetensors file, as far as it is used here."""

    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_tensor(self, name: str) -> np.ndarray: ...


@contextmanager
def opened(file: Path) -> Iterator[Opened]:
    """An open safetensors file. Raises CheckpointError for one that is truncated or damaged."""
    try:
        with safe_open(file, framework="np") as found:
            yield found
    except SafetensorError as error:
        raise CheckpointError(f"{file}: truncated or damaged ({error})") from error


class Difference:
    """The changed tensors of a version, whose files have all arrived. ``names``: of all tensors."""

    def __init__(
        self,
        folder: Path,
        metadata: Mapping[str, Any],
        weight_map: Mapping[str, str],
        checksums: Mapping[str, str] | None,
    ) -> None:
        """``checksums``: by tensor; None where each file has its own."""
        self._checksums = checksums
        self._apply = _encoding(folder, metadata)
        self._checksum = _checksum(folder, metadata.get("checksum_format"))
        self.names = frozenset(weight_map)
        self.files = sorted(folder.glob("*.safetensors"))
        found: set[str] = set()
        for file in self.files:
            with opened(file) as tensors:
                found.update(tensors.keys())
        if found != self.names:
            raise CheckpointError(
                f"{folder}: its files and its index differ, a part of it may not have arrived yet: "
                f"{listed(sorted(found ^ self.names))}"
            )

    def apply(self, places: Mapping[str, Place]) -> None:
        """Write to these places. Raises CheckpointError where a tensor does not become what its
        trainer has."""
        for file in self.files:
            with opened(file) as tensors:
                checksums = self._checksums or tensors.metadata() or {}
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    values = _mapped(*places[name])
                    self._apply(values, tensors.get_tensor(name).tobytes(), f"{file}: {name}")
                    if self._checksum(values) != checksums.get(name):
                        raise CheckpointError(
                            f"{file}: {name} has another checksum than its trainer's"
                        )


def _mapped(path: Path, start: int, size: int) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r+", start, (size,))
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be mapped ({error}); pull again") from error


def _integer(value: object) -> object:
    """The number in a text like ``000007``; what is none stays as it is."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value) else value


Apply = Callable[[np.ndarray, bytes, str], None]


def _encoding(folder: Path, difference: Mapping[str, Any]) -> Apply:
    if difference.get("compression_format") != "zstd":
        raise CheckpointError(
            f"{folder}: compression_format={difference.get('compression_format')!r}; zstd is read"
        )
    if find_spec("zstandard") is None:
        raise CheckpointError(f"{folder} is compressed: pip install '.[pull]'")
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
    import zstandard

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
    raise CheckpointError(f"{folder}: {algorithm} is not installed: pip install '.[pull]'")
