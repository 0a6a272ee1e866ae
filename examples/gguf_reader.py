"""Reads a GGUF file with numpy: metadata, and tensors dequantised to float32.

The layout and the block formats are those of ggml's specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Only the block formats that the demo
model uses are read; any other is refused by number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_BLOCK_LEN = 32  # weights that share a scale, in Q4_1 and Q8_0 alike


def _read_f32(raw: np.ndarray) -> np.ndarray:
    return raw.view("<f4")


def _read_q4_1(raw: np.ndarray) -> np.ndarray:
    """Scale and minimum as float16, then 16 bytes: low nibbles are weights 0-15, high 16-31."""
    blocks = raw.reshape(-1, 4 + _BLOCK_LEN // 2)
    scale, minimum = (blocks[:, i : i + 2].view("<f2").astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return nibbles.astype(np.float32) * scale + minimum


def _read_q8_0(raw: np.ndarray) -> np.ndarray:
    """Scale as float16, then 32 signed bytes."""
    blocks = raw.reshape(-1, 2 + _BLOCK_LEN)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * blocks[:, :2].view("<f2")


@dataclass(frozen=True)
class _BlockFormat:
    name: str
    block_len: int
    block_bytes: int
    read: Callable[[np.ndarray], np.ndarray]


_FORMATS = {
    0: _BlockFormat("F32", 1, 4, _read_f32),
    3: _BlockFormat("Q4_1", _BLOCK_LEN, 20, _read_q4_1),
    8: _BlockFormat("Q8_0", _BLOCK_LEN, 34, _read_q8_0),
}


class GgufFile:
    """``metadata`` by key; ``tensors()`` yields (name, float32 array, rows first)."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 0
        if self._bytes[:4].tobytes() != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not start with the bytes GGUF")
        self._at = 4
        version, num_tensors, num_keys = self._scalar("I"), self._scalar("Q"), self._scalar("Q")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version}; versions 2 and 3 are read")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self._infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        self._data_start = -(-self._at // alignment) * alignment

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, shape, type_id, offset in self._infos:
            if type_id not in _FORMATS:
                known = ", ".join(f.name for f in _FORMATS.values())
                raise ValueError(f"tensor {name} is of ggml type {type_id}; read are {known}")
            block = _FORMATS[type_id]
            num_bytes = int(np.prod(shape)) // block.block_len * block.block_bytes
            start = self._data_start + offset
            yield name, block.read(self._bytes[start : start + num_bytes]).reshape(shape)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes.data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._bytes[self._at - length : self._at].tobytes().decode()

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            item_type, length = self._scalar("I"), self._scalar("Q")
            return [self._value(item_type) for _ in range(length)]
        return self._scalar(_SCALARS[type_id])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        sizes = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return name, tuple(reversed(sizes)), self._scalar("I"), self._scalar("Q")
