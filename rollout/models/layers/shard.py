"""Matrix products and tensors that are split over ranks.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_loader import WeightLoader
from rollout.parallel import RankGroup

Part = range | tuple[range, ...]
"""A rank's indices along one dimension: one range, or several that are adjacent in its tensor."""


def summed(linear: Linear, x_MI: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """A product [M, O] whose input features are split over ranks; ``x_MI`` has this rank's.

    Partial sums are rounded to the model's dtype and added in rank order, the bias last.
    """
    if group.size == 1:
        return linear(x_MI)
    y_MO = group.sum(linear.without_bias(x_MI))
    return y_MO if linear.bias_O is None else y_MO + linear.bias_O


def shard_of(
    own: WeightLoader, group: RankGroup, parts: Sequence[Part], dim: int = 0
) -> WeightLoader:
    """A loader of the whole tensor of which ``own`` is this rank's part.

    Writing takes the whole tensor and reads only this rank's part of it, so that little of a mapped
    file is read. Reading is a collective that assembles the parts in a new tensor.

    ``parts``: of each rank, along ``dim``; parts may overlap.
    """
    if group.size == 1:
        return own
    ranges = [(part,) if isinstance(part, range) else part for part in parts]
    lengths = [sum(len(each) for each in part) for part in ranges]
    shape = list(own.shape)
    shape[dim] = max(each.stop for part in ranges for each in part)

    def write(whole: torch.Tensor) -> None:
        views = [whole.narrow(dim, each.start, len(each)) for each in ranges[group.rank]]
        own.write(views[0] if len(views) == 1 else torch.cat(views, dim))

    def read() -> torch.Tensor:
        own_part = own.read()
        padded_shape = list(own_part.shape)
        padded_shape[dim] = max(lengths)
        padded = own_part.new_zeros(padded_shape)
        padded.narrow(dim, 0, own_part.shape[dim]).copy_(own_part)
        whole = own_part.new_empty(shape)
        for gathered, part in zip(group.gather(padded), ranges, strict=True):
            start = 0
            for each in part:
                values = gathered.narrow(dim, start, len(each))
                whole.narrow(dim, each.start, len(each)).copy_(values)
                start += len(each)
        return whole

    return replace(own, shape=tuple(shape), write=write, read=read)


def shards_of(
    own: Mapping[str, WeightLoader], group: RankGroup, parts: Mapping[str, Sequence[Part]]
) -> dict[str, WeightLoader]:
    """Loaders of weights and biases whose output features are split.

    ``parts``: by the last but one part of the name, such as q_proj for ``q_proj.weight``.
    """
    return {
        name: shard_of(loader, group, parts[name.split(".")[-2]]) for name, loader in own.items()
    }


def input_shards_of(
    own: Mapping[str, WeightLoader], group: RankGroup, parts: Sequence[Part]
) -> dict[str, WeightLoader]:
    """Loaders of weights whose input features are split; each rank has whole biases."""
    return {
        name: shard_of(each, group, parts, dim=1) if name.endswith(".weight") else each
        for name, each in own.items()
    }
