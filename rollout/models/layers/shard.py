"""Products and tensors of which each rank has a part.

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
"""Indices along one dimension: a stretch, or several, side by side in the rank's own tensor."""


def summed(linear: Linear, x_MI: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """[M, O] of a product whose input features are spread over the ranks: ``x_MI`` has this one's.

    Partial sums are rounded to the model's dtype and added in rank order, the bias last.
    """
    if group.size == 1:
        return linear(x_MI)
    y_MO = group.sum(linear.without_bias(x_MI))
    return y_MO if linear.bias_O is None else y_MO + linear.bias_O


def shard_of(
    own: WeightLoader, group: RankGroup, parts: Sequence[Part], dim: int = 0
) -> WeightLoader:
    """The whole tensor of which ``own`` is this rank's part.

    It is written with the whole, of which the part alone is read, so that of a mapped file little
    else is. Reading it is a call that every rank makes: parts come together in a new tensor.

    ``parts``: of each rank, along ``dim``; ranks may have the same.
    """
    if group.size == 1:
        return own
    stretches = [(part,) if isinstance(part, range) else part for part in parts]
    lengths = [sum(len(each) for each in part) for part in stretches]
    shape = list(own.shape)
    shape[dim] = max(each.stop for part in stretches for each in part)

    def write(whole: torch.Tensor) -> None:
        pieces = [whole.narrow(dim, each.start, len(each)) for each in stretches[group.rank]]
        own.write(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim))

    def read() -> torch.Tensor:
        kept = own.read()
        padded_shape = list(kept.shape)
        padded_shape[dim] = max(lengths)
        padded = kept.new_zeros(padded_shape)
        padded.narrow(dim, 0, kept.shape[dim]).copy_(kept)
        whole = kept.new_empty(shape)
        for piece, part in zip(group.gather(padded), stretches, strict=True):
            start = 0
            for each in part:
                values = piece.narrow(dim, start, len(each))
                whole.narrow(dim, each.start, len(each)).copy_(values)
                start += len(each)
        return whole

    return replace(own, shape=tuple(shape), write=write, read=read)


def shards_of(
    own: Mapping[str, WeightLoader], group: RankGroup, parts: Mapping[str, Sequence[Part]]
) -> dict[str, WeightLoader]:
    """Weights and biases of products whose output features are split.

    ``parts``: by the last but one part of the name, as q_proj is of ``q_proj.weight``.
    """
    return {
        name: shard_of(loader, group, parts[name.split(".")[-2]]) for name, loader in own.items()
    }


def input_shards_of(
    own: Mapping[str, WeightLoader], group: RankGroup, parts: Sequence[Part]
) -> dict[str, WeightLoader]:
    """Weights of products whose input features are split; each rank has their biases whole."""
    return {
        name: shard_of(each, group, parts, dim=1) if name.endswith(".weight") else each
        for name, each in own.items()
    }
