"""The tensors of a safetensors folder, read one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rollout.errors import CheckpointError
from rollout.models.layers.weight_loader import WeightLoader, mismatches
from rollout.models.mxfp4 import BLOCKS, SCALES, dequantised, mxfp4_shape
from rollout.models.pulled_folder import refuse_half_pulled
from rollout.models.spec import read_json

_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_TABLE_DTYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_LISTED = 12

Progress = Callable[[int, int], None]
"""Called after every tensor with the bytes read so far and in all."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """A folder with model.safetensors, or with shards and their index.

    Opening reads the headers only. Raises CheckpointError, naming the file, if there are no
    weights, a shard is missing or truncated, the index names a tensor that its shard lacks, a
    tensor has no floating dtype, or a pull into the folder has not ended. A weight in MXFP4 is one
    tensor in bfloat16. Rotary frequencies in old checkpoints are skipped: every model computes
    them.
    """

    def __init__(self, folder: Path, tables: Collection[str] = ()) -> None:
        """``tables``: last name parts of tensors that may hold integers or booleans."""
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._tables = frozenset(tables)
        self._quantised: dict[str, StoredTensor] = {}  # blocks and scales
        refuse_half_pulled(folder)
        for file, names in _files(folder).items():
            self._read_header(file, names)
        for name in sorted({n.removesuffix(BLOCKS).removesuffix(SCALES) for n in self._quantised}):
            self._add_quantised(name)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype with most bytes; float32 without tensors."""
        bytes_of: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                bytes_of[tensor.dtype] += tensor.num_bytes
        return max(bytes_of, key=bytes_of.__getitem__, default=torch.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by tensor name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and memory-mapped tensors, file by file. A tensor is valid until the next one."""
        by_file: dict[Path, list[str]] = {}
        for name, stored in self.tensors.items():
            by_file.setdefault(stored.file, []).append(name)
        for file, names in by_file.items():
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in names:
                    is_quantised = name + BLOCKS in self._quantised
                    yield name, self.read(name) if is_quantised else opened.get_tensor(name)

    def load_into(
        self,
        weight_loaders: Mapping[str, WeightLoader],
        names: Mapping[str, str],
        progress: Progress | None = None,
    ) -> None:
        """Fill the tensors of a model, one at a time.

        ``names``: of the tensors to read, here and among the loaders. Raises CheckpointError before
        any is written where one is missing, unexpected or of another shape.
        """
        shapes = {loaded: self.tensors[stored].shape for stored, loaded in names.items()}
        problems = mismatches(weight_loaders, shapes)
        if problems:
            raise CheckpointError(f"{self.folder}: {listed(problems)}")
        total, done = sum(self.tensors[name].num_bytes for name in names), 0
        for name, tensor in self:
            if name not in names:
                continue
            weight_loaders[names[name]].write(tensor)
            done += self.tensors[name].num_bytes
            if progress is not None:
                progress(done, total)

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor."""
        if name + BLOCKS in self._quantised:
            return dequantised(self.read(name + BLOCKS), self.read(name + SCALES))
        stored = self.tensors[name] if name in self.tensors else self._quantised[name]
        with safe_open(stored.file, framework="pt", device="cpu") as opened:
            return opened.get_tensor(name).clone()

    def _read_header(self, file: Path, names: list[str] | None) -> None:
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                present = sorted(opened.keys())
                wanted = present if names is None else names
                absent = sorted(set(wanted).difference(present))
                if absent:
                    raise CheckpointError(
                        f"{file}: {_INDEX} names tensors that are not in it: {listed(absent)}"
                    )
                for name in wanted:
                    header = opened.get_slice(name)
                    self._add(name, file, header.get_shape(), header.get_dtype())
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {_damage(file)} ({error})") from error

    def _add(self, name: str, file: Path, shape: list[int], dtype: str) -> None:
        if name.endswith("rotary_emb.inv_freq"):
            return
        if dtype == "U8" and name.endswith((BLOCKS, SCALES)):
            self._quantised[name] = StoredTensor(file, tuple(shape), torch.uint8)
            return
        known = _DTYPES
        if ":" in name or name.rpartition(".")[2] in self._tables:  # places: see weights/delta.py
            known = _DTYPES | _TABLE_DTYPES
        if dtype not in known:
            raise CheckpointError(
                f"{file}: {name} is stored as {dtype}; only {', '.join(known)} are read "
                "(quantised weights are not)"
            )
        self.tensors[name] = StoredTensor(file, tuple(shape), known[dtype])

    def _add_quantised(self, name: str) -> None:
        blocks, scales = (self._quantised.get(name + part) for part in (BLOCKS, SCALES))
        if blocks is None or scales is None:
            part = BLOCKS if blocks is None else SCALES
            raise CheckpointError(f"{self.folder}: {name}{part} is missing; MXFP4 has both")
        if len(blocks.shape) != 4 or scales.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"{blocks.file}: {name}{BLOCKS} is {list(blocks.shape)} and {name}{SCALES} is "
                f"{list(scales.shape)}; MXFP4 has [N, O, G, 16] and [N, O, G]"
            )
        self.tensors[name] = StoredTensor(blocks.file, mxfp4_shape(blocks.shape), torch.bfloat16)


def listed(items: list[str]) -> str:
    """The first few items, and how many more there are."""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Weight files with the names of the tensors to read from each; None means all."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.exists():
        return {single: None}
    if index.exists():
        return dict(_shards(folder, index))
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise CheckpointError(
            f"{folder}: {len(found)} safetensors files but no {_INDEX} to say which tensor is where"
        )
    names = sorted(path.name for path in folder.iterdir())
    raise CheckpointError(
        f"{folder}: no .safetensors file among {listed(names) or 'no files at all'}; weights are "
        "read from safetensors only (.bin and .pt are pickles, which can run code)"
    )


def _shards(folder: Path, index: Path) -> dict[Path, list[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    shards: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise CheckpointError(
                f"{index}: {name} is in {file!r}, which is not a file of the folder"
            )
        shards.setdefault(folder / file, []).append(name)
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} shards missing: {listed(missing)}"
        )
    return shards


def _damage(file: Path) -> str:
    with file.open("rb") as opened:
        start = opened.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the weights themselves; run git lfs pull"
    return f"truncated or damaged safetensors file of {file.stat().st_size} bytes; fetch it again"
