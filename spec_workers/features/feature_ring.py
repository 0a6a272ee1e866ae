"""A bounded ring of sequences with the hidden states that the target computed for them.

The ring is in shared memory: one process writes, any number read, and none of them waits. Offsets
only count up; an offset modulo the capacity is an index into the memory. Records in [oldest, head)
are complete:

    write:  move oldest past every record that will be overwritten; write the record at head;
            move head behind it
    read:   copy a record; it is valid if oldest has not passed it meanwhile, and if its words add
            up to the sum in it (they may not if the processor reordered stores)

Records are contiguous: one that would reach past the end of the memory begins at its start, and the
rest before the end is skipped.

Legend: L tokens of a sequence, N rows of features, F feature columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.weights.segment import MappedSegment, OwnedSegment, remove_orphans

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_SHARE = 8
"""A sequence takes at most one byte in so many, so that a ring holds several sequences."""

_MAGIC = b"SPECRING"
_LAYOUT_VERSION = 1
_MAX_LAYERS = 16
_HEADER_BYTES = 256
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("layout_version", "<u4"),
        ("dtype", "S12"),
        ("num_columns", "<u4"),
        ("num_layers", "<u4"),
        ("layers", "<u4", _MAX_LAYERS),
        ("final", "<u4"),
        ("capacity", "<u8"),
        ("oldest", "<u8"),
        ("head", "<u8"),
        ("taken", "<u8"),  # how often a reader has read everything
    ],
    align=True,
)
_RECORD = np.dtype(
    [
        ("num_bytes", "<u8"),  # of the record, a multiple of its alignment
        ("sum", "<u8"),  # of its other words
        ("is_skipped", "<u4"),  # nothing is in it
        ("num_tokens", "<u4"),
        ("num_rows", "<u4"),
        ("first_position", "<u4"),
        ("prompt_len", "<u4"),
        ("weight_version", "<i8"),
        ("number", "<u8"),
    ],
    align=True,
)
_ALIGNMENT = 64
assert _HEADER.itemsize <= _HEADER_BYTES
assert _RECORD.itemsize <= _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSequence:
    """A request's tokens from the first on, and features at consecutive positions.

    Positions found in the prefix cache have no features: ``first_position`` is then larger than 0.
    All of ``features_NF`` were computed by one weight version.
    """

    token_ids_L: torch.Tensor  # int64, L >= first_position + N
    prompt_len: int
    first_position: int
    features_NF: torch.Tensor  # in the ring's dtype and layout
    weight_version: int
    number: int  # sequences written before it


class FeatureRing:
    """The writer's end, which owns the memory. `FeatureReader` is the other end.

    Args:
        num_bytes: shared memory, allocated at once.
        features: the states in each row, ``hidden_size`` columns each.
        dtype: the dtype of the rows.
        field: the name of ``num_bytes`` in errors.

    Raises InvalidInputError for a size that holds no sequence, WeightUpdateError if shared memory
    has no room.
    """

    def __init__(
        self,
        num_bytes: int,
        features: AuxHiddenStates,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        field: str = "num_bytes",
    ) -> None:
        assert len(features.layers) <= _MAX_LAYERS
        self.features = features
        self.dtype = dtype
        self.num_columns = features.count * hidden_size
        self.row_bytes = self.num_columns * dtype.itemsize
        capacity = num_bytes // _ALIGNMENT * _ALIGNMENT
        least = LARGEST_SHARE * (2 * self.row_bytes + 16 * _ALIGNMENT)
        if capacity < least:
            raise InvalidInputError(
                field, num_bytes, f"must be >= {least} for rows of {self.row_bytes} bytes"
            )
        remove_orphans()
        self._segment = OwnedSegment(_HEADER_BYTES + capacity, f"choose a smaller {field}")
        payload = self._segment.flat.numpy()
        self._header = payload[: _HEADER.itemsize].view(_HEADER)
        self._data = payload[_HEADER_BYTES:]
        self._starts: deque[int] = deque()  # offsets of the records in [oldest, head)
        self.num_written = 0
        header = self._header
        header["layout_version"], header["capacity"] = _LAYOUT_VERSION, capacity
        header["dtype"] = str(dtype).removeprefix("torch.")
        header["num_columns"], header["num_layers"] = self.num_columns, len(features.layers)
        header["layers"][0, : len(features.layers)] = features.layers
        header["final"] = features.final
        header["magic"] = _MAGIC

    @property
    def name(self) -> str:
        """The name by which other processes of this user on this host open the ring."""
        return self._segment.name

    @property
    def capacity(self) -> int:
        """Bytes of records."""
        return len(self._data)

    @property
    def times_taken(self) -> int:
        """The number of times a reader has emptied the ring."""
        return int(self._header["taken"][0])

    def max_rows(self, num_tokens: int) -> int:
        """The most rows that a sequence of ``num_tokens`` tokens may have."""
        return (self.capacity // LARGEST_SHARE - 4 * num_tokens - 3 * _ALIGNMENT) // self.row_bytes

    def write(
        self,
        token_ids: Sequence[int],
        rows: Sequence[torch.Tensor],
        *,
        first_position: int,
        prompt_len: int,
        weight_version: int,
    ) -> None:
        """Add a sequence, overwriting the oldest ones.

        Args:
            rows: blocks of features [n, F] at consecutive positions, on the CPU; at most `max_rows`
                in all. They are copied once, into the ring.
            first_position: position of the first row.
        """
        num_rows = sum(len(block) for block in rows)
        assert num_rows <= self.max_rows(len(token_ids)), "the sequence is too long for the ring"
        assert first_position + num_rows <= len(token_ids)
        rows_at = _aligned(_RECORD.itemsize + 4 * len(token_ids))
        num_bytes = _aligned(rows_at + num_rows * self.row_bytes)
        record = self._data[self._reserve(num_bytes) :][:num_bytes]
        fields = record[: _RECORD.itemsize].view(_RECORD)
        record[_RECORD.itemsize : rows_at] = 0
        record[_RECORD.itemsize :][: 4 * len(token_ids)].view(np.int32)[:] = token_ids
        feature_bytes = record[rows_at:][: num_rows * self.row_bytes]
        record[rows_at + len(feature_bytes) :] = 0
        if num_rows:
            rows_NF = (
                torch.from_numpy(feature_bytes).view(self.dtype).view(num_rows, self.num_columns)
            )
            torch.cat(list(rows), out=rows_NF)
        fields["num_bytes"], fields["is_skipped"] = num_bytes, 0
        fields["num_tokens"], fields["num_rows"] = len(token_ids), num_rows
        fields["first_position"], fields["prompt_len"] = first_position, prompt_len
        fields["weight_version"], fields["number"] = weight_version, self.num_written
        fields["sum"] = 0
        fields["sum"] = _sum(record)
        self._publish(num_bytes)
        self.num_written += 1

    def reader(self) -> FeatureReader:
        """A reader in this process."""
        return FeatureReader(self._segment)

    def close(self) -> None:
        """Remove the shared memory; readers keep their mapping."""
        self._segment.close()

    def _reserve(self, num_bytes: int) -> int:
        """Reserve ``num_bytes`` for a record, which no reader sees yet. Returns its index."""
        head = int(self._header["head"][0])
        left = self.capacity - head % self.capacity
        if left < num_bytes:
            self._make_room(head + left)
            skipped = self._data[head % self.capacity :][: _RECORD.itemsize].view(_RECORD)
            skipped["num_bytes"], skipped["is_skipped"] = left, 1
            self._publish(left)
            head += left
        self._make_room(head + num_bytes)
        return head % self.capacity

    def _make_room(self, end: int) -> None:
        while self._starts and self._starts[0] < end - self.capacity:
            self._starts.popleft()
        head = int(self._header["head"][0])
        self._header["oldest"][0] = self._starts[0] if self._starts else head

    def _publish(self, num_bytes: int) -> None:
        head = int(self._header["head"][0])
        self._starts.append(head)
        self._header["head"][0] = head + num_bytes


class FeatureReader:
    """Reads each sequence once, oldest first. Sequences overwritten before that are missed."""

    def __init__(self, segment: OwnedSegment | MappedSegment) -> None:
        """Raises InvalidInputError for a segment that is not a ring."""
        self._segment = segment
        payload = segment.flat.numpy()
        header = payload[: _HEADER.itemsize].view(_HEADER)
        dtype = DTYPES.get(header["dtype"][0].decode("ascii", "replace"))
        capacity, num_layers = int(header["capacity"][0]), int(header["num_layers"][0])
        if (
            header["magic"][0] != _MAGIC
            or header["layout_version"] != _LAYOUT_VERSION
            or dtype is None
            or num_layers > _MAX_LAYERS
            or not 0 < capacity <= len(payload) - _HEADER_BYTES
            or not header["num_columns"]
        ):
            raise InvalidInputError("ring", segment.name, "is not a feature ring of this layout")
        self._header = header
        self._data = payload[_HEADER_BYTES:][:capacity]
        self._cursor = 0  # offset of the record to read next
        self.dtype = dtype
        self.num_columns = int(header["num_columns"][0])
        self.features = AuxHiddenStates(
            layers=tuple(header["layers"][0, :num_layers].tolist()), final=bool(header["final"][0])
        )
        self.num_missed = 0  # sequences
        self._next_number = 0

    @classmethod
    def open(cls, name: str) -> Self:
        """A reader of another process's ring. Raises InvalidInputError if there is none of that
        name."""
        return cls(MappedSegment(name, _HEADER_BYTES, "ring", writable=True))

    def take(self) -> list[FeatureSequence]:
        """Copies of the sequences that came since the last call."""
        taken: list[FeatureSequence] = []
        while True:
            self._cursor = max(self._cursor, int(self._header["oldest"][0]))
            if self._cursor >= int(self._header["head"][0]):
                self._header["taken"][0] += 1
                return taken
            record = self._copy_record()
            if record is None:
                continue
            self._cursor += len(record)
            sequence = self._sequence(record)
            if sequence is not None:
                self.num_missed += sequence.number - self._next_number
                self._next_number = sequence.number + 1
                taken.append(sequence)

    def _copy_record(self) -> np.ndarray | None:
        """A copy of the record at the cursor. If it was overwritten, None, and the cursor moves
        on."""
        index, newest = self._cursor % len(self._data), int(self._header["head"][0])
        num_bytes = int(self._data[index:][:8].view("<u8")[0])
        if _RECORD.itemsize <= num_bytes <= len(self._data) - index:
            record = self._data[index : index + num_bytes].copy()
            if int(self._header["oldest"][0]) > self._cursor:
                return None
            fields = record[: _RECORD.itemsize].view(_RECORD)
            expected, fields["sum"] = int(fields["sum"][0]), 0
            if fields["is_skipped"] or _sum(record) == expected:
                return record
        self._cursor = max(self._cursor, newest)
        return None

    def _sequence(self, record: np.ndarray) -> FeatureSequence | None:
        fields = record[: _RECORD.itemsize].view(_RECORD)[0]
        if fields["is_skipped"]:
            return None
        num_tokens, num_rows = int(fields["num_tokens"]), int(fields["num_rows"])
        tokens = record[_RECORD.itemsize :][: 4 * num_tokens].view(np.int32)
        rows_at = _aligned(_RECORD.itemsize + 4 * num_tokens)
        features = torch.from_numpy(record[rows_at:])[
            : num_rows * self.num_columns * self.dtype.itemsize
        ]
        return FeatureSequence(
            token_ids_L=torch.from_numpy(tokens.astype(np.int64)),
            prompt_len=int(fields["prompt_len"]),
            first_position=int(fields["first_position"]),
            features_NF=features.view(self.dtype).view(num_rows, self.num_columns),
            weight_version=int(fields["weight_version"]),
            number=int(fields["number"]),
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _sum(record: np.ndarray) -> int:
    return int(np.add.reduce(record.view("<u8"), dtype=np.uint64))
