"""The MLP half of a decoder layer, which reads each row alone.

Legend: T query rows of this rank, S query rows of all ranks, E hidden, F ffn.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.experts import Experts, RouteRecorder
from rollout.models.layers.linear import Linear, linear_weight_loaders
from rollout.models.layers.shard import shards_of
from rollout.models.layers.split_linear import SplitLinear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.own_weights import LayerHalf
from rollout.models.spec import ModelSpec
from rollout.parallel.partition import even_parts, gather_rows


class FeedForward(LayerHalf, Protocol):
    """The MLP half of a layer, dense or sparse."""

    def __call__(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        """The MLP's output [T, E] for normed input, to add to the residual."""
        ...


def feed_forward(
    spec: ModelSpec,
    weights: WeightFactory,
    layer: int,
    experts_class: type[Experts] = Experts,
) -> FeedForward:
    """The MLP of a layer: experts if ``spec.experts`` contains the layer.

    Raises InvalidInputError for more ranks than features.
    """
    experts = spec.experts
    if experts is None or layer not in experts.layers:
        return Mlp(spec, weights)
    return experts_class(
        experts,
        experts.layers.index(layer),
        weights,
        hidden_size=spec.hidden_size,
        activation=spec.activation,
    )


class Mlp:
    """The gated MLP (Shazeer 2020), a `FeedForward`. Gate and up are one fused product.

    Each of several ranks has some of the inner features. Ranks with rows of their own compute the
    rows of all ranks.
    """

    def __init__(self, spec: ModelSpec, weights: WeightFactory) -> None:
        """Raises InvalidInputError for more ranks than features."""
        hidden, ffn, bias = spec.hidden_size, spec.ffn_size, spec.mlp_bias
        self._group, self._rows = weights.ranks.all, weights.ranks.rows
        rank, size = self._group.rank, self._group.size
        self._activation = spec.activation
        self._features = even_parts(ffn, size)
        if not self._features[-1] or hidden < size:
            raise InvalidInputError(
                "parallel.size", size, f"is too many for an MLP of {hidden} and {ffn}"
            )
        self.gate_up = weights.linear(hidden, 2 * len(self._features[rank]), bias=bias)
        self.down = SplitLinear(weights, self._group, self._features, hidden, bias=bias)

    def __call__(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        """[T, E]. T may be zero if other ranks have rows."""
        own = slice(None)
        if self._rows.size > 1:
            hidden_TE, own = gather_rows(self._rows, hidden_TE)
        inner_SF = self._activation(self.gate_up(hidden_TE))
        return self.down(inner_SF)[own]

    def linears(self) -> list[Linear]:
        """The MLP's matrix products."""
        return [self.gate_up, self.down.linear]

    def plain_weights(self) -> list[torch.Tensor]:
        return self.down.plain_weights()

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        features = len(self._features[self._group.rank])
        gate_up = linear_weight_loaders(
            at, self.gate_up, {"gate_proj": features, "up_proj": features}
        )
        parts = {"gate_proj": self._features, "up_proj": self._features}
        own = shards_of(gate_up, self._group, parts)
        return own | self.down.weight_loaders(at, "down_proj")
