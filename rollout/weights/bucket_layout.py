"""The division of an update's tensors into buckets, and their offsets in each.

One greedy rule lays tensors out in the order they come: so a sender that packs a stream and a
receiver that knows only names, dtypes and shapes arrive at the same offsets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from rollout.errors import InvalidInputError
from rollout.validation import checked_int, checked_list, checked_name, checked_object
from rollout.weights.manifest import Manifest, TensorSpec, dtype_name, named_dtype

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size


@dataclass(frozen=True, slots=True)
class BucketEntry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The offsets of a bucket's tensors. ``num_bytes`` is what the buffer must hold."""

    entries: tuple[BucketEntry, ...]

    @property
    def num_bytes(self) -> int:
        """The last entry's end."""
        return self.entries[-1].end if self.entries else 0

    def to_json(self) -> dict[str, Any]:
        entries = [
            {
                "name": entry.name,
                "dtype": dtype_name(entry.dtype),
                "shape": list(entry.shape),
                "start": entry.start,
                "end": entry.end,
            }
            for entry in self.entries
        ]
        return {"num_bytes": self.num_bytes, "entries": entries}

    @classmethod
    def from_json(cls, value: object, field: str = "layout") -> Self:
        """Raises InvalidInputError, naming the field, for anything `to_json` would not write."""
        fields = checked_object(value, ("num_bytes", "entries"), field)
        limit = checked_int(fields["num_bytes"], f"{field}.num_bytes")
        entries: list[BucketEntry] = []
        for index, item in enumerate(checked_list(fields["entries"], f"{field}.entries")):
            at = f"{field}.entries[{index}]"
            entry = _entry(item, at)
            if entries and entry.start < entries[-1].end:
                raise InvalidInputError(
                    f"{at}.start", entry.start, f"overlaps {entries[-1].name!r}, which ends later"
                )
            if entry.end > limit:
                raise InvalidInputError(
                    f"{at}.end", entry.end, f"is beyond the bucket's {limit} bytes"
                )
            entries.append(entry)
        _refuse_twice([entry.name for entry in entries], f"{field}.entries")
        layout = cls(tuple(entries))
        if layout.num_bytes != limit:
            raise InvalidInputError(
                f"{field}.num_bytes", limit, f"must be the last entry's end, {layout.num_bytes}"
            )
        return layout


class BucketPacker:
    """The greedy rule: a tensor goes behind the last, or opens the next bucket."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = checked_bucket_bytes(bucket_bytes)
        self.entries: list[BucketEntry] = []
        self._end = 0

    def entry_for(self, name: str, spec: TensorSpec) -> BucketEntry | None:
        """The place of the tensor in this bucket; None where the bucket must be closed first."""
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        end = start + spec.num_bytes
        if self.entries and end > self._bucket_bytes:
            return None
        entry = BucketEntry(name, spec.dtype, spec.shape, start, end)
        self.entries.append(entry)
        self._end = end
        return entry

    def close(self) -> BucketLayout:
        """The layout of this bucket; the next tensor opens another."""
        layout = BucketLayout(tuple(self.entries))
        self.entries, self._end = [], 0
        return layout


def layouts(manifest: Manifest, bucket_bytes: int) -> list[BucketLayout]:
    """The buckets that `buckets` makes of these tensors in this order."""
    packer = BucketPacker(bucket_bytes)
    found: list[BucketLayout] = []
    for name, spec in manifest.items():
        if packer.entry_for(name, spec) is None:
            found.append(packer.close())
            packer.entry_for(name, spec)
    return found + ([packer.close()] if packer.entries else [])


def manifest_of_layouts(found: Iterable[BucketLayout]) -> Manifest:
    """The manifest of buckets. Raises InvalidInputError for a name that comes twice."""
    entries = [entry for layout in found for entry in layout.entries]
    _refuse_twice([entry.name for entry in entries], "entries")
    return {entry.name: TensorSpec(entry.shape, entry.dtype) for entry in entries}


def checked_bucket_bytes(value: object) -> int:
    return checked_int(value, "bucket_bytes", minimum=ALIGNMENT)


def _entry(value: object, field: str) -> BucketEntry:
    fields = checked_object(value, ("name", "dtype", "shape", "start", "end"), field)
    dtype = named_dtype(fields["dtype"], f"{field}.dtype")
    shape = tuple(
        checked_int(size, f"{field}.shape[{index}]")
        for index, size in enumerate(checked_list(fields["shape"], f"{field}.shape"))
    )
    start = checked_int(fields["start"], f"{field}.start")
    end = checked_int(fields["end"], f"{field}.end")
    if start % ALIGNMENT:
        raise InvalidInputError(f"{field}.start", start, f"must be a multiple of {ALIGNMENT}")
    num_bytes = TensorSpec(shape, dtype).num_bytes
    if end - start != num_bytes:
        raise InvalidInputError(f"{field}.end", end, f"must be start + {num_bytes} bytes")
    return BucketEntry(checked_name(fields["name"], f"{field}.name"), dtype, shape, start, end)


def _refuse_twice(names: list[str], field: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidInputError(field, twice, "must name each tensor once")
