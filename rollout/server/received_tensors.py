"""Safetensors bytes that came over HTTP, and how many tensors one call may name.

Each name is looked at on the engine's thread, or with the interpreter's lock held: nothing is
generated meanwhile.
"""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

import torch
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError
from safetensors import SafetensorError, safe_open

from rollout.errors import InvalidInputError
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.source import WeightTensors

MAX_TENSORS = 2**16

T = TypeVar("T")


def too_many(count: int) -> str:
    """The reason why one call may not name so many tensors; empty where it may."""
    if count <= MAX_TENSORS:
        return ""
    return f"one call names at most {MAX_TENSORS} tensors, not {count}: make it several calls"


def _checked(value: Any) -> Any:
    if isinstance(value, Sequence | Mapping):
        _refuse(len(value))
    return value


def _checked_handles(value: Any) -> Any:
    """The handles, if their layouts together name few enough tensors. Malformed ones pass: the call
    refuses them."""
    if isinstance(value, list):
        layouts = [each.get("layout") for each in value if isinstance(each, dict)]
        entries = [each.get("entries") for each in layouts if isinstance(each, dict)]
        _refuse(sum(len(each) for each in entries if isinstance(each, list)))
    return value


def _refuse(count: int) -> None:
    if reason := too_many(count):
        raise PydanticCustomError("too_many_tensors", "{reason}", {"reason": reason})


PerTensor = Annotated[T, BeforeValidator(_checked)]
"""A list or a mapping with a member for each tensor."""

Handles = Annotated[list[dict[str, Any]], BeforeValidator(_checked_handles)]


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that can be received. The transaction says which of them a weight may have."""

_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one
_PICKLES = (b"\x80", b"PK\x03\x04")  # of any protocol since 2; torch.save's archive


class ReceivedFile:
    """A file that grows as bytes come. On Linux it is in memory.

    `close` gives it back at once; without it that waits for whoever still holds this object, the
    traceback of an exception for one.
    """

    def __init__(self, field: str) -> None:
        """``field``: what brought the bytes, for errors."""
        self.field = field
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("tensors")
            self.path = f"/proc/self/fd/{self._descriptor}"
            self._close = weakref.finalize(self, os.close, self._descriptor)
        else:
            self._descriptor, self.path = tempfile.mkstemp()
            self._close = weakref.finalize(self, _remove, self._descriptor, self.path)

    def close(self) -> None:
        """Free the file; views of its tensors stay valid. A second call does nothing."""
        self._close()

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    @property
    def tensor_count(self) -> int:
        """Tensors that the file's header speaks of, or more where a name holds odd things."""
        announced = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        size = os.fstat(self._descriptor).st_size
        header = os.pread(self._descriptor, min(announced, size, _LONGEST_HEADER), 8)
        return header.count(b'"dtype"')

    def refuse(self, error: Exception) -> InvalidInputError:
        """Raise an error that names what the body is instead of a safetensors file."""
        start = os.pread(self._descriptor, 4, 0)
        size = os.fstat(self._descriptor).st_size
        if start.startswith(_PICKLES):
            remedy = (
                "is a pickle (torch.save, or sglang's serializer), which can run code: send the "
                "bytes of safetensors.torch.save, or the weights by another call"
            )
        else:
            remedy = f"must be safetensors bytes, as of safetensors.torch.save ({error})"
        return InvalidInputError(self.field, f"{size} bytes", remedy)


class ReceivedTensors(WeightTensors):
    """The tensors of one or several files. They are views of the files.

    Read inside ``with`` they leave nothing behind. Raises InvalidInputError, naming the file's
    field, for what is no safetensors file, and for a name that comes twice.
    """

    is_stored = True

    def __init__(self, files: Sequence[ReceivedFile]) -> None:
        self._files = files
        if reason := too_many(sum(file.tensor_count for file in files)):
            raise InvalidInputError(files[-1].field, f"{len(files)} files", reason)
        headers = [_header(file) for file in files]
        twice = [
            name
            for name, count in Counter(name for header in headers for name in header).items()
            if count > 1
        ]
        if twice:
            raise InvalidInputError(files[-1].field, twice, "must bring each tensor once")
        self._manifest = {name: spec for header in headers for name, spec in header.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    def manifest(self) -> Manifest:
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            with safe_open(file.path, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    yield name, opened.get_tensor(name)


def _remove(descriptor: int, path: str) -> None:
    os.close(descriptor)
    os.unlink(path)


def _header(file: ReceivedFile) -> dict[str, TensorSpec]:
    try:
        with safe_open(file.path, framework="pt", device="cpu") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            stored = {
                name: (tuple(part.get_shape()), part.get_dtype()) for name, part in found.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise file.refuse(error) from None
    for name, (_, dtype) in stored.items():
        if dtype not in _DTYPES:
            raise InvalidInputError(file.field, dtype, f"is no dtype that is read, of {name}")
    return {name: TensorSpec(shape, _DTYPES[dtype]) for name, (shape, dtype) in stored.items()}
