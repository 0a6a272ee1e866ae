"""Weights that rank 0 was given, as a stream of tensors on every rank that runs one model.

Rank 0 packs a bucket into shared memory and tells the others where; each reads what it needs there.
While they read, rank 0 packs the next. Where ranks cannot map its segments (other hosts) or shared
memory is full, it sends the bytes instead. ::

    every rank                   rank 0                        the others
    share: are we on one host?
    step: all are done with   -> where the next bucket is, or  -> read it
          the last bucket        its bytes, or the end

Every stream is shared by all ranks and ends for all: rank 0 tells the end however its call ends,
and a rank that does not read to the end takes the rest off the wire.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch

from rollout.errors import ParallelError, WeightUpdateError
from rollout.parallel import RankGroup
from rollout.weights.bucket import CACHED_BUCKET_BYTES, FlattenedBucket, buckets
from rollout.weights.bucket_layout import BucketLayout
from rollout.weights.manifest import Manifest
from rollout.weights.segment import host_memory
from rollout.weights.shared_memory import (
    SharedMemoryHandle,
    SharedMemoryReceiver,
    SharedMemorySender,
)
from rollout.weights.source import NamedTensors, WeightTensors, closed_iterator

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What is known of a stream before it is read."""

    manifest: Manifest | None
    is_stored: bool
    is_direct: bool
    own_options: Mapping[str, Any]


class RankStream(WeightTensors):
    """The tensors of one update call, to be read once. Rank 0 alone can check them all.

    ``weights``: what rank 0 was given; None on other ranks.
    """

    checks_for_all = True

    def __init__(
        self, group: RankGroup, spec: StreamSpec, weights: WeightTensors | None = None
    ) -> None:
        self.spec = spec
        self.is_stored = spec.is_stored
        self.is_direct = spec.is_direct
        self.own_options = spec.own_options
        self._weights = weights
        self._group = group
        self._on_one_host = False
        self._is_over = False
        self._flat = torch.empty(0, dtype=torch.uint8)  # of rank 0, where segments cannot be had

    @classmethod
    def from_rank_0(cls, group: RankGroup, weights: WeightTensors) -> Self:
        """The stream of what rank 0 was given. Raises what its ``manifest`` does."""
        spec = StreamSpec(
            weights.manifest(), weights.is_stored, weights.is_direct, dict(weights.own_options)
        )
        return cls(group, spec, weights)

    def manifest(self) -> Manifest | None:
        return self.spec.manifest

    def tensors_to_check(self) -> NamedTensors:
        return () if self._weights is None else self._weights.tensors_to_check()

    @contextmanager
    def shared(self) -> Iterator[Self]:
        """A context for the call that reads it, which every rank enters: a collective, that finds
        out whether segments can be shared. The stream ends on all ranks, however the call does."""
        self._on_one_host = len(set(self._group.all_gather_text(host_memory()))) == 1
        try:
            yield self
        except ParallelError:
            raise
        except BaseException as error:
            self._finish(f"it failed: {error}")
            raise
        self._finish()

    def _finish(self, reason: str = "it was not read to its end") -> None:
        """End the stream for all ranks, whoever has read how much of it. A collective where it has
        not ended."""
        while not self._is_over:
            self._step({"error": reason})

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._sent() if self._group.rank == 0 else self._received()

    def _step(self, fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Rank 0's next message, once every rank is done with the one before."""
        self._group.all_gather_int(0)
        message = json.loads(self._group.broadcast_bytes(json.dumps(fields).encode()))
        self._is_over = "error" in message
        if self._group.rank and message.get("has_bytes"):
            return message, self._group.broadcast_bytes(b"")
        return message, b""

    def _sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._weights is not None
        with ExitStack() as stack:
            sender = stack.enter_context(SharedMemorySender(CACHED_BUCKET_BYTES))
            segments = [sender] if self._on_one_host else []

            def buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
                try:
                    if segments:
                        return segments[0].next_flat(num_bytes, device)
                except WeightUpdateError as error:
                    log.warning("weights are sent to the other ranks byte by byte: %s", error)
                    segments.clear()
                if self._flat.numel() < num_bytes:
                    self._flat = torch.empty(num_bytes, dtype=torch.uint8)
                return self._flat

            stream = buckets(self._weights, CACHED_BUCKET_BYTES // 2, buffer=buffer)
            for bucket in stack.enter_context(closed_iterator(stream)):
                if segments:
                    self._step({"handle": segments[0].handle(bucket.layout)})
                else:
                    self._step({"layout": bucket.layout.to_json(), "has_bytes": True})
                    self._group.broadcast_bytes(bucket.used.numpy().tobytes())
                yield from bucket.unflatten()
            self._step({"error": ""})

    def _received(self) -> Iterator[tuple[str, torch.Tensor]]:
        receiver = SharedMemoryReceiver()
        while not self._is_over:
            message, data = self._step({})
            if "handle" in message:
                handle = SharedMemoryHandle.from_json(message["handle"])
                yield from receiver.tensors(handle, "handle")
            elif "layout" in message:
                flat = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
                layout = BucketLayout.from_json(message["layout"])
                yield from FlattenedBucket(flat, layout).unflatten()
        if message["error"]:
            raise WeightUpdateError(f"rank 0: {message['error']}")
