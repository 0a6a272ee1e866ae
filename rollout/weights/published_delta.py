"""A version of the weights that a trainer published as what has changed since the last, SkyRL's.

Its folder holds safetensors files of changed tensors, each the xor of old and new bytes compressed
with zstd, and ``manifest.json``, with a checksum of what each tensor must become.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from rollout.errors import CheckpointError
from rollout.models.checkpoint import listed
from rollout.models.spec import read_json

MANIFEST = "manifest.json"
_CHECKSUM = "xxh3-128"

Place = tuple[Path, int, int]
"""The place of a tensor: its file, the offset of its first byte, its number of bytes."""


class PublishedDelta:
    """The changes from the version before to this one, whose files have all arrived.

    ``checksums``: of all changed tensors by name, in hexadecimal.
    """

    def __init__(self, folder: Path, version: int) -> None:
        """Raises CheckpointError if not all is there, or it is of another version."""
        if find_spec("zstandard") is None or find_spec("xxhash") is None:
            raise CheckpointError(f"{folder} is compressed: pip install '.[pull]'")
        path = folder / MANIFEST
        values = read_json(path)
        try:
            self.checksums = {each["name"]: each["checksum"] for each in values["tensors"]}
            algorithms = {each.get("checksum_algorithm", _CHECKSUM) for each in values["tensors"]}
            found = {name: int(values[name]) for name in ("version", "base_version")}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: is not what SkyRL writes: {error!r}") from error
        known = {"version": version, "base_version": version - 1}
        if found != known:
            raise CheckpointError(f"{path}: says {found}, it must be {known}")
        if odd := algorithms - {_CHECKSUM}:
            raise CheckpointError(f"{path}: checksum_algorithm={odd}; {_CHECKSUM} is read")
        self._files = sorted(folder.glob("*.safetensors"))
        arrived: set[str] = set()
        for file in self._files:
            with opened(file) as tensors:
                arrived.update(tensors.keys())
        if missing := arrived ^ self.checksums.keys():
            raise CheckpointError(
                f"{folder}: its files and its manifest differ, a part of it may not have arrived "
                f"yet: {listed(sorted(missing))}"
            )

    def apply(self, places: Mapping[str, Place]) -> None:
        """Write to these places. Raises CheckpointError where a tensor does not become what its
        trainer has."""
        import xxhash

        for file in self._files:
            with opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    where = f"{file}: {name}"
                    values = _mapped(*places[name])
                    values ^= _decompressed(tensors.get_tensor(name).tobytes(), values.size, where)
                    if xxhash.xxh3_128_hexdigest(values.data) != self.checksums[name]:
                        raise CheckpointError(f"{where} has another checksum than its trainer's")


class Opened(Protocol):
    """An open safetensors file, as far as it is used here."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> np.ndarray: ...


@contextmanager
def opened(file: Path) -> Iterator[Opened]:
    """An open safetensors file. Raises CheckpointError for one that is truncated or damaged."""
    try:
        with safe_open(file, framework="np") as found:
            yield found
    except SafetensorError as error:
        raise CheckpointError(f"{file}: truncated or damaged ({error})") from error


def _mapped(path: Path, start: int, size: int) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r+", start, (size,))
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be mapped ({error}); pull again") from error


def _decompressed(data: bytes, num_bytes: int, where: str) -> np.ndarray:
    """Exactly so many bytes, which the frame says beforehand."""
    import zstandard

    try:
        size = zstandard.frame_content_size(data)
        if size != num_bytes:
            raise CheckpointError(f"{where} says {size} bytes, it must be {num_bytes}")
        found = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
    return np.frombuffer(found, np.uint8)
