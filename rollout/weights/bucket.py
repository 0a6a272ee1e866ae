"""Buckets: tensors side by side in one flat buffer, as every transport carries them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.errors import InvalidInputError
from rollout.validation import checked_iterable
from rollout.weights.bucket_layout import (
    ALIGNMENT,
    BucketEntry,
    BucketLayout,
    BucketPacker,
    manifest_of_layouts,
)
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.source import (
    NamedTensors,
    TensorSource,
    WeightTensors,
    closed_iterator,
)

DEFAULT_BUCKET_BYTES = 512 * 2**20
CACHED_BUCKET_BYTES = 32 * 2**20
"""The default size of buckets on the CPU. Larger ones cost up to twice the time, for memory touched
anew each time and missed by the caches, and leave sender and receiver less to do at once."""


@dataclass(frozen=True, slots=True)
class FlattenedBucket:
    """Tensors packed into one uint8 buffer.

    ``flat`` is one-dimensional, contiguous, and at least ``layout.num_bytes`` long. It may be
    reused for the next bucket: a bucket is valid until the next is asked for.
    """

    flat: torch.Tensor
    layout: BucketLayout

    def __post_init__(self) -> None:
        flat = self.flat
        if flat.dtype is not torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise InvalidInputError(
                "flat", f"{flat.dtype} {list(flat.shape)}", "must be contiguous uint8 [bytes]"
            )
        if flat.numel() < self.layout.num_bytes:
            raise InvalidInputError(
                "flat", flat.numel(), f"must hold the layout's {self.layout.num_bytes} bytes"
            )
        if flat.storage_offset() % ALIGNMENT:
            raise InvalidInputError(
                "flat", flat.storage_offset(), f"must start at a multiple of {ALIGNMENT} bytes"
            )

    @property
    def used(self) -> torch.Tensor:
        """The bytes that are sent: uint8 [num_bytes]."""
        return self.flat[: self.layout.num_bytes]

    def unflatten(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and views into the buffer; nothing is copied."""
        for entry in self.layout.entries:
            yield entry.name, _view(self.flat, entry)


def buckets(
    named_tensors: NamedTensors,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    *,
    device: torch.device | None = None,
    buffer: Callable[[int, torch.device], torch.Tensor] | None = None,
) -> Iterator[FlattenedBucket]:
    """Pack a stream into one buffer, used again for every bucket. Closing it closes the stream.

    A tensor larger than ``bucket_bytes`` is a bucket of its own and is not copied: the memory
    needed is one bucket, less where all tensors are known to fit in less.

    Args:
        device: of the buffer; by default that of the first tensor.
        buffer: given a number of bytes and a device, a uint8 buffer at least as long for the next
            bucket. Larger tensors are then copied as well.
    """
    packer = BucketPacker(bucket_bytes)
    capacity = _capacity(named_tensors, bucket_bytes)
    flat: torch.Tensor | None = None
    with closed_iterator(named_tensors) as tensors:
        for name, tensor in tensors:
            spec = TensorSpec.of(tensor)
            entry = packer.entry_for(name, spec)
            if entry is None:
                assert flat is not None
                yield FlattenedBucket(flat, packer.close())
                entry = packer.entry_for(name, spec)
            assert entry is not None, "an empty bucket takes any tensor"
            if buffer is None and entry.end > bucket_bytes:
                yield FlattenedBucket(_flat(tensor, device), packer.close())
                continue
            if buffer is not None and len(packer.entries) == 1:
                flat = buffer(max(capacity, entry.end), device or tensor.device)
            elif flat is None:
                flat = torch.empty(capacity, dtype=torch.uint8, device=device or tensor.device)
            with torch.inference_mode():
                _view(flat, entry).copy_(tensor)
    if packer.entries:
        assert flat is not None
        yield FlattenedBucket(flat, packer.close())


@dataclass(frozen=True, eq=False)
class PackedBucket(WeightTensors):
    """A bucket as numpy's array and plain containers, so that receivers unpickle nothing of
    torch."""

    flat: NDArray[np.uint8]  # (num_bytes,)
    layout: Mapping[str, Any]  # BucketLayout.to_json()
    is_direct: bool = False
    is_stored = True

    @classmethod
    def of(cls, bucket: FlattenedBucket, *, is_direct: bool = False) -> Self:
        """A copy: the bucket's buffer may be used again."""
        return cls(bucket.used.cpu().numpy().copy(), bucket.layout.to_json(), is_direct)

    @cached_property
    def unpacked(self) -> FlattenedBucket:
        """Views of ``flat``. Raises InvalidInputError, naming the field, for a malformed one."""
        layout = BucketLayout.from_json(self.layout, "bucket.layout")
        if not isinstance(self.flat, np.ndarray) or self.flat.dtype != np.uint8:
            raise InvalidInputError("bucket.flat", type(self.flat), "must be an array of uint8")
        with warnings.catch_warnings():  # of memory that must not be written: it is only read
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return FlattenedBucket(torch.from_numpy(self.flat), layout)

    def manifest(self) -> Manifest:
        return manifest_of_layouts([self.unpacked.layout])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.unpacked.unflatten()


def tensor_source(named_tensors: Any, load_format: str | None = None) -> WeightTensors:
    """The source of what `update_weights_from_tensor` is given. Its ``manifest`` raises
    InvalidInputError for what cannot be weights."""
    if isinstance(named_tensors, WeightTensors):
        return named_tensors
    if isinstance(load_format, str) and load_format == "flattened_bucket":
        return BucketSource(named_tensors)
    return TensorSource(named_tensors, load_format)


class BucketSource(WeightTensors):
    """`FlattenedBucket`s: several that all exist, or an iterator that reuses one buffer."""

    def __init__(self, stream: Iterable[FlattenedBucket]) -> None:
        self._stream = stream
        self.is_stored = isinstance(stream, Collection)

    def manifest(self) -> Manifest | None:
        """Raises InvalidInputError where two of a collection lie in one buffer: `buckets` reuses
        its own, so what it yields must be taken one by one."""
        stream = checked_iterable(self._stream, "named_tensors", "FlattenedBuckets")
        if not isinstance(stream, Collection):
            return None
        for index, bucket in enumerate(stream):
            _refuse_other(bucket, index)
        if len({bucket.flat.data_ptr() for bucket in stream}) < len(stream):
            raise InvalidInputError(
                "named_tensors", len(stream),
                "buckets share a buffer, which holds the last of them: hand over the iterator "
                "itself",
            )  # fmt: skip
        return manifest_of_layouts(bucket.layout for bucket in stream)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with closed_iterator(self._stream) as found:
            for index, bucket in enumerate(found):
                _refuse_other(bucket, index)
                yield from bucket.unflatten()


def _refuse_other(bucket: object, index: int) -> None:
    if not isinstance(bucket, FlattenedBucket):
        raise InvalidInputError(f"named_tensors[{index}]", bucket, "must be a FlattenedBucket")


def _capacity(named_tensors: NamedTensors, bucket_bytes: int) -> int:
    """The bytes a bucket's buffer must hold: no more than all tensors where they are known."""
    manifest = tensor_source(named_tensors).manifest()
    if manifest is None:
        return bucket_bytes
    return min(bucket_bytes, sum(spec.num_bytes + ALIGNMENT for spec in manifest.values()))


def _flat(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """The bytes of a tensor: itself, where it is contiguous and on that device."""
    values = tensor.detach().to(device or tensor.device).contiguous()
    flat = values.view(-1).view(torch.uint8)
    return flat if flat.storage_offset() % ALIGNMENT == 0 else flat.clone()


def _view(flat: torch.Tensor, entry: BucketEntry) -> torch.Tensor:
    taken = flat[entry.start : entry.end]
    if entry.start % entry.dtype.itemsize:  # between tensors that others packed without gaps
        taken = taken.clone()
    return taken.view(entry.dtype).view(entry.shape)
