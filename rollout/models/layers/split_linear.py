"""A matrix product of rows whose input features are split over ranks.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.models.layers.linear import linear_weight_loaders
from rollout.models.layers.shard import shard_of, shards_of
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.parallel import RankGroup
from rollout.parallel.partition import even_parts


class SplitLinear:
    """A product that gives every rank all output features.

    Exact, ranks exchange the inputs, each computes its own output features from all of them, and
    they exchange those: no sum is split, so the bits are those of one rank. Otherwise each rank
    multiplies its own inputs and the products are added up: one exchange instead of two, but the
    bits depend on the number of ranks.
    """

    def __init__(
        self,
        weights: WeightFactory,
        group: RankGroup,
        inputs: Sequence[range],
        outputs: int,
        *,
        bias: bool = False,
    ) -> None:
        """``inputs``: features of each rank, consecutive. ``outputs``: no fewer than ranks."""
        self._group, self._inputs = group, inputs
        self._outputs = even_parts(outputs, group.size)
        self._adds_up = group.size > 1 and not weights.exact
        rank = group.rank
        if self._adds_up:
            self.linear = weights.linear(len(inputs[rank]), outputs)
        else:
            own = len(self._outputs[rank])
            self.linear = weights.linear(inputs[-1].stop, own, bias=bias)
        self._bias_O = weights.tensor(outputs) if bias and self._adds_up else None

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        """All output features [M, O] of rows whose own input features are given."""
        if self._group.size == 1:
            return self.linear(x_MI)
        if not self._adds_up:
            y_MO = self.linear(self._group.all_gather_columns(x_MI, self._inputs))
            return self._group.all_gather_columns(y_MO, self._outputs)
        y_MO = self._group.all_reduce(self.linear(x_MI))
        return y_MO if self._bias_O is None else y_MO.add_(self._bias_O)

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to ``linear``."""
        return [] if self._bias_O is None else [self._bias_O]

    def weight_loaders(self, prefix: str, name: str) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. ``name``: such as o_proj."""
        own = linear_weight_loaders(prefix, self.linear, {name: self.linear.out_features})
        if not self._adds_up:
            return shards_of(own, self._group, {name: self._outputs})
        found = {at: shard_of(each, self._group, self._inputs, dim=1) for at, each in own.items()}
        if self._bias_O is not None:
            found[f"{prefix}.{name}.bias"] = WeightLoader.of(self._bias_O)
        return found
