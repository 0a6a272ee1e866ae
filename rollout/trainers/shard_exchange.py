"""Sends slices of sharded parameters from the ranks that hold them to the ranks that need them.

A parameter is a row of elements here. Each rank holds one range of it, the ranges of all ranks one
after the other, and needs some ranges, which are ascending. So what a rank needs, in order, is what
rank 0 has of it, then what rank 1 has of it, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from rollout.weights.manifest import Manifest, Slices


@dataclass(frozen=True, slots=True)
class FlatShard:
    """The elements that this rank holds of a parameter, and the ranges that all ranks hold."""

    values: torch.Tensor  # 1-dimensional
    held: Sequence[range]


class ShardExchange:
    """The exchanges of one pass over a model's weights.

    No rank ever has more of a tensor than it holds and needs. What it both holds and needs is not
    sent.

    Args:
        device: one whose tensors the group can send.
        manifest: of the weights as they are to come.
        needed: by rank, what it needs of each weight; of one that is not named, nothing.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        manifest: Manifest,
        needed: Sequence[Slices],
    ) -> None:
        self._group = group
        self._device = device
        self._manifest = manifest
        self._needed = needed
        self._rank = distributed.get_rank(group)

    def run(self, shards: Mapping[str, FlatShard]) -> dict[str, list[torch.Tensor]]:
        """The pieces that `needed_slice` makes this rank's slices of, by name. A collective."""
        by_dtype: dict[torch.dtype, dict[str, FlatShard]] = {}
        for name, shard in shards.items():
            by_dtype.setdefault(self._manifest[name].dtype, {})[name] = shard
        pieces: dict[str, list[torch.Tensor]] = {}
        for dtype, some in by_dtype.items():
            pieces |= self._exchanged(dtype, some)
        return pieces

    def needed_slice(self, name: str, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The slice that this rank needs of a weight: a view of the only piece, or a copy."""
        where, (shape, dtype) = self._needed[self._rank][name], self._manifest[name]
        flat = pieces[0] if len(pieces) == 1 else self._joined(pieces, dtype)
        flat = flat.to(self._device, dtype)
        return flat.view(shape if where is None else where.shape_of(shape))

    def _exchanged(
        self, dtype: torch.dtype, shards: Mapping[str, FlatShard]
    ) -> dict[str, list[torch.Tensor]]:
        me, ranks = self._rank, range(len(self._needed))
        sent = [
            [piece for name, shard in shards.items() for piece in self._cut(shard, rank, name)]
            if rank != me
            else []
            for rank in ranks
        ]
        to_send = [sum(map(len, pieces)) for pieces in sent]
        lengths = [
            [
                sum(map(len, self._common(shard.held[rank], me, name))) if rank != me else 0
                for name, shard in shards.items()
            ]
            for rank in ranks
        ]
        to_receive = [sum(each) for each in lengths]
        outgoing = self._joined([piece for pieces in sent for piece in pieces], dtype)
        incoming = torch.empty(sum(to_receive), dtype=dtype, device=self._device)
        distributed.all_to_all_single(incoming, outgoing, to_receive, to_send, group=self._group)
        received = [
            block.split(each)
            for block, each in zip(incoming.split(to_receive), lengths, strict=True)
        ]
        found: dict[str, list[torch.Tensor]] = {}
        for index, (name, shard) in enumerate(shards.items()):
            if name in self._needed[me]:
                of_ranks = [
                    [received[rank][index]] if rank != me else list(self._cut(shard, me, name))
                    for rank in ranks
                ]
                found[name] = [piece for some in of_ranks for piece in some if len(piece)]
        return found

    def _joined(self, pieces: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A copy of all pieces, converted on the way."""
        joined = torch.empty(sum(map(len, pieces)), dtype=dtype, device=self._device)
        start = 0
        for piece in pieces:
            joined[start : start + len(piece)].copy_(piece)
            start += len(piece)
        return joined

    def _cut(self, shard: FlatShard, rank: int, name: str) -> Iterator[torch.Tensor]:
        """Views of the elements that this rank holds of a weight and ``rank`` needs."""
        held = shard.held[self._rank]
        for each in self._common(held, rank, name):
            yield shard.values[each.start - held.start : each.stop - held.start]

    def _common(self, held: range, rank: int, name: str) -> Iterator[range]:
        """The elements of ``held`` that a rank needs of a weight."""
        if name not in self._needed[rank]:
            return
        where, (shape, _) = self._needed[rank][name], self._manifest[name]
        whole = [range(torch.Size(shape).numel())]
        for each in whole if where is None else where.flat_ranges(shape):
            start, stop = max(each.start, held.start), min(each.stop, held.stop)
            if start < stop:
                yield range(start, stop)
