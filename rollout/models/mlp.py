"""The dense MLP half of a decoder layer: SwiGLU (Shazeer 2020).

Legend: T query rows, E hidden.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollout.layers.destination import Destination
from rollout.layers.linear import Linear, linear_destinations
from rollout.models.causal_lm import RouteRecorder
from rollout.models.spec import ModelSpec
from rollout.ops.silu_mul import silu_mul


class FeedForward(Protocol):
    """The MLP half of a layer, dense or sparse."""

    def __call__(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        """[T, E], to be added to the residual. The input is normed already."""
        ...

    def linears(self) -> list[Linear]: ...

    def plain_weights(self) -> list[torch.Tensor]:
        """Those that are no product's."""
        ...

    def destinations(self, at: str) -> dict[str, Destination]:
        """``at``: the prefix of its names in checkpoints, as model.layers.0.mlp."""
        ...


class Mlp:
    """See FeedForward. Gate and up are one product."""

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, packing: bool
    ) -> None:
        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(
                inputs, outputs, bias=spec.mlp_bias, dtype=dtype, device=device, packing=packing
            )

        self.gate_up = linear(spec.hidden_size, 2 * spec.ffn_size)
        self.down = linear(spec.ffn_size, spec.hidden_size)

    def __call__(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(hidden_TE)))

    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def plain_weights(self) -> list[torch.Tensor]:
        return []

    def destinations(self, at: str) -> dict[str, Destination]:
        ffn = self.down.in_features
        found = linear_destinations(at, self.gate_up, {"gate_proj": ffn, "up_proj": ffn})
        return found | linear_destinations(at, self.down, {"down_proj": self.down.out_features})
