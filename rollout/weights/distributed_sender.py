"""The sending end of a weight group. The protocol is described in `distributed.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.validation import checked_seconds
from rollout.weights.bucket import CACHED_BUCKET_BYTES, FlattenedBucket, buckets
from rollout.weights.bucket_layout import (
    BucketEntry,
    checked_bucket_bytes,
    layouts,
    sliced_layout,
)
from rollout.weights.distributed import manifest_digest, outcome
from rollout.weights.group import WeightGroup
from rollout.weights.manifest import Manifest, Slices, TensorSpec, dtype_name, slices_from_json
from rollout.weights.source import WeightTensors, closed_iterator


class DistributedSender:
    """Streams weights from rank 0 of a group to all its receivers."""

    def __init__(self, group: WeightGroup, bucket_bytes: int = CACHED_BUCKET_BYTES) -> None:
        if group.rank != 0:
            raise InvalidInputError("group.rank", group.rank, "the sender must be rank 0")
        self._group = group
        self._bucket_bytes = checked_bucket_bytes(bucket_bytes)

    def arguments(self, source: WeightTensors) -> dict[str, Any]:
        """The arguments of every engine's update_weights_from_distributed, JSON-able."""
        manifest = _manifest(source)
        return {
            "names": list(manifest),
            "dtypes": [dtype_name(spec.dtype) for spec in manifest.values()],
            "shapes": [list(spec.shape) for spec in manifest.values()],
            "group_name": self._group.name,
            "load_format": "flattened_bucket",
        }

    def send(self, source: WeightTensors, timeout: float | None = None) -> None:
        """Send all of it, while every engine is in its update_weights_from_distributed.

        Returns when every receiver has loaded it. Raises WeightUpdateError, naming ranks, where
        one refuses (nothing was sent), fails or does not answer within ``timeout`` seconds.
        """
        seconds = self._group.timeout if timeout is None else checked_seconds(timeout, "timeout")
        manifest = _manifest(source)
        number = self._announce(manifest)
        try:
            self._transfer(number, source, manifest, seconds)
        finally:
            # Whoever comes now is too late for it.
            self._group.notes.put("announcement", {"number": number, "over": True})

    def _transfer(
        self, number: int, source: WeightTensors, manifest: Manifest, seconds: float
    ) -> None:
        try:
            answers = self._require(number, "answer", seconds, "takes this update")
            needed = {
                rank: slices_from_json(note["needed"], manifest, f"answer/{rank}.needed")
                for rank, note in answers.items()
            }
        except RolloutError as error:
            self._group.notes.put("go", outcome(number, error))
            raise
        is_sliced = any(any(slices.values()) for slices in needed.values())
        self._group.notes.put("go", outcome(number, None) | {"sliced": is_sliced})
        try:
            if is_sliced:
                self._stream_slices(source, manifest, needed, seconds)
            else:
                self._stream(source, manifest, seconds)
        except BaseException as error:
            self._group.notes.put("withdrawn", outcome(number, error))
            self._group.close(f"the sender failed: {error}")
            raise
        self._require(number, "result", seconds, "has loaded this update")

    def _announce(self, manifest: Manifest) -> int:
        self._group.last_update += 1
        note = {
            "number": self._group.last_update,
            "over": False,
            "manifest": manifest_digest(manifest),
            "bucket_bytes": self._bucket_bytes,
        }
        self._group.notes.put("announcement", note)
        return self._group.last_update

    def _require(
        self, number: int, kind: str, seconds: float, what: str
    ) -> dict[int, dict[str, Any]]:
        """Every receiver's note, without an error in it, by rank."""
        keys = {f"{kind}/{rank}": rank for rank in self._group.receivers}
        notes = self._group.notes.collect(keys, seconds, lambda note: note["number"] == number)
        errors = [
            f"rank {rank}: {notes[key]['error']}"
            for key, rank in keys.items()
            if key in notes and notes[key]["error"]
        ]
        silent = [str(rank) for key, rank in keys.items() if key not in notes]
        if silent:
            errors.append(f"no answer in {seconds:g} seconds from rank {', '.join(silent)}")
        if errors:
            raise WeightUpdateError(
                f"group {self._group.name!r}: not every receiver {what}: {'; '.join(errors)}"
            )
        return {rank: notes[key] for key, rank in keys.items()}

    def _stream(self, source: WeightTensors, manifest: Manifest, seconds: float) -> None:
        expected = iter(layouts(manifest, self._bucket_bytes))
        stream = buckets(source, self._bucket_bytes, device=self._group.device)
        with closed_iterator(stream) as packed:
            for bucket in packed:
                if bucket.layout != next(expected, None):
                    raise WeightUpdateError(
                        f"the source yields {bucket.layout.entries[0].name!r} and what follows in "
                        "another order or shape than its manifest says"
                    )
                self._group.broadcast(bucket.used, seconds)
        if next(expected, None) is not None:
            raise WeightUpdateError("the source ended before its manifest was through")

    def _stream_slices(
        self,
        source: WeightTensors,
        manifest: Manifest,
        needed: Mapping[int, Slices],
        seconds: float,
    ) -> None:
        """Send each rank what it needs of each bucket. Ranks of equal needs share a buffer; all
        buffers together hold little more than a bucket, or the largest tensor."""
        kinds: list[tuple[Slices, list[int]]] = []
        for rank, slices in needed.items():
            same = next((ranks for other, ranks in kinds if other == slices), None)
            if same is None:
                kinds.append((slices, [rank]))
            else:
                same.append(rank)
        whole = layouts(manifest, self._bucket_bytes)
        sliced = [[sliced_layout(layout, slices) for layout in whole] for slices, _ in kinds]
        sizes = [max((layout.num_bytes for layout in each), default=0) for each in sliced]
        flats = [torch.empty(n, dtype=torch.uint8, device=self._group.device) for n in sizes]
        with closed_iterator(source) as stream:
            for layout, *of_kinds in zip(whole, *sliced, strict=True):
                packed = [
                    FlattenedBucket(flat, each) for flat, each in zip(flats, of_kinds, strict=True)
                ]
                views = zip(*(bucket.unflatten() for bucket in packed), strict=True)
                for entry, of_entry in zip(layout.entries, views, strict=True):
                    tensor = _next_tensor(stream, entry)
                    for (slices, _), (name, view) in zip(kinds, of_entry, strict=True):
                        where = slices.get(name)
                        view.copy_(tensor if where is None else where.of(tensor))
                tensors = {
                    rank: bucket.used
                    for bucket, (_, ranks) in zip(packed, kinds, strict=True)
                    for rank in ranks
                }
                self._group.send(tensors, seconds)
            if next(stream, None) is not None:
                raise WeightUpdateError("the source goes on where its manifest ends")


def _manifest(source: WeightTensors) -> Manifest:
    manifest = source.manifest()
    if manifest is None:
        raise InvalidInputError("source", type(source).__name__, "must know what it will bring")
    return manifest


def _next_tensor(stream: Iterator[tuple[str, torch.Tensor]], entry: BucketEntry) -> torch.Tensor:
    """The source's next tensor. Raises WeightUpdateError unless it is the entry's."""
    name, tensor = next(stream, ("", None))
    if tensor is None:
        raise WeightUpdateError("the source ended before its manifest was through")
    if (name, *TensorSpec.of(tensor)) != (entry.name, entry.shape, entry.dtype):
        raise WeightUpdateError(
            f"the source yields {name!r} and what follows in another order or shape than its "
            "manifest says"
        )
    return tensor.detach()
