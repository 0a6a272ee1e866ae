"""Loaders of tensors that are split over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rollout.models.layers.weight_loader import Shard, TensorSlice, WeightLoader
from rollout.parallel import RankGroup

Part = range | tuple[range, ...]
"""A rank's indices along one dimension: one range, or several that are adjacent in its tensor."""


def shard_of(
    own: WeightLoader, group: RankGroup, parts: Sequence[Part], dim: int = 0
) -> WeightLoader:
    """A loader of a whole tensor; ``own`` loads this rank's part of it.

    Writing takes the whole tensor and reads only this rank's part of it, so that little of a mapped
    file is read. Reading is a collective that assembles the parts in a new tensor. ``shard`` writes
    the part alone.

    ``parts``: of each rank, along ``dim``; parts may overlap.
    """
    if group.size == 1:
        return own
    ranges = [(part,) if isinstance(part, range) else part for part in parts]
    lengths = [sum(len(each) for each in part) for part in ranges]
    shape = list(own.shape)
    shape[dim] = max(each.stop for part in ranges for each in part)
    where = TensorSlice(dim, ranges[group.rank])

    def write(whole: torch.Tensor) -> None:
        own.write(where.of(whole))

    def read() -> torch.Tensor:
        own_part = own.read()
        padded_shape = list(own_part.shape)
        padded_shape[dim] = max(lengths)
        padded = own_part.new_zeros(padded_shape)
        padded.narrow(dim, 0, own_part.shape[dim]).copy_(own_part)
        whole = own_part.new_empty(shape)
        for gathered, part in zip(group.all_gather(padded), ranges, strict=True):
            start = 0
            for each in part:
                values = gathered.narrow(dim, start, len(each))
                whole.narrow(dim, each.start, len(each)).copy_(values)
                start += len(each)
        return whole

    shard = Shard(where, own)
    return replace(own, shape=tuple(shape), write=write, read=read, shard=shard)


def shards_of(
    own: Mapping[str, WeightLoader], group: RankGroup, parts: Mapping[str, Sequence[Part]]
) -> dict[str, WeightLoader]:
    """Loaders of weights and biases whose output features are split.

    ``parts``: by the last but one part of the name, such as q_proj for ``q_proj.weight``.
    """
    return {
        name: shard_of(loader, group, parts[name.split(".")[-2]]) for name, loader in own.items()
    }
