"""The sparse MLP half of a decoder layer, whose router picks a few experts for each row.

Sources: Shazeer et al. 2017 (Outrageously Large Neural Networks), Qwen2-MoE (Yang et al. 2024; the
shared expert and its gate), Qwen3-MoE (Yang et al. 2025), DeepSeek-V3 (DeepSeek-AI 2024; groups and
the correction bias).

Legend: T query rows, E hidden, F ffn of one expert, N experts, X experts per row, S = T * X pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from rollout.errors import InvalidInputError
from rollout.models.experts_config import ExpertsSpec
from rollout.models.layers.grouped_linear import GroupedLinear
from rollout.models.layers.linear import Linear, linear_weight_loaders
from rollout.models.layers.shard import shard_of, shards_of
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.ops.combine_experts import combine_experts
from rollout.ops.glu import silu_mul
from rollout.ops.group_rows import group_rows
from rollout.ops.matmul.tiles import Tile
from rollout.ops.routing import route
from rollout.parallel.partition import even_parts, gather_rows

Activation = Callable[[torch.Tensor], torch.Tensor]
"""From gate and up columns [T, 2 F] to inner features [T, F]."""


class RouteRecorder(Protocol):
    """Receives the experts of each row of a step."""

    def record(self, layer: int, experts_TX: torch.Tensor) -> None:
        """``layer``: index among sparse layers. ``experts_TX``: int, the most probable first."""
        ...


class Experts:
    """A sparse MLP, a `FeedForward`. Gate and up are one fused product; so are router and shared
    gate. A router in float32 chooses what a trainer's does, where a product's rounding to 16 bits
    would change the order of experts.

    A row's result depends on that row alone: its experts, their products, and the sum of these in
    the order of choice.

    Each of several ranks has the whole router, and some of the output features of every expert's
    products: no sum is split, so a row's bits are those of one rank alone. Ranks with rows of their
    own compute the rows of all ranks.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        index: int,
        weights: WeightFactory,
        *,
        hidden_size: int,
        bias: bool = False,
        activation: Activation = silu_mul,
    ) -> None:
        """
        Args:
            index: among the sparse layers.
            bias: whether the router's and the experts' products have biases.
            activation: of an expert's gate and up columns.

        Raises InvalidInputError for more ranks than features.
        """

        def linear(inputs: int, outputs: int) -> Linear:
            return weights.linear(inputs, outputs, bias=bias)

        def grouped(inputs: int, outputs: int) -> GroupedLinear:
            return GroupedLinear(spec.num_experts, inputs, outputs, weights, bias=bias)

        self.index = index
        self.spec = spec
        self._activation = activation
        has_shared = spec.shared_ffn_size > 0
        self._has_gate = has_shared and spec.shared_gate
        self._group, self._rows = weights.ranks.all, weights.ranks.rows
        self._features = self._parts(spec.ffn_size)
        self._shared_features = self._parts(spec.shared_ffn_size) if has_shared else ()
        self._outputs = self._parts(hidden_size)
        outputs = len(self._outputs[self._group.rank])
        self.router = weights.linear(
            hidden_size,
            spec.num_experts + self._has_gate,
            bias=bias,
            dtype=torch.float32 if spec.exact_router else None,
        )
        self._bias_N: torch.Tensor | None = None
        if spec.correction_bias:
            self._bias_N = weights.tensor(spec.num_experts, dtype=torch.float32)
        self.gate_up = grouped(hidden_size, 2 * len(self._features[self._group.rank]))
        self.down = grouped(spec.ffn_size, outputs)
        self._shared: list[Linear] = []
        if has_shared:
            features = len(self._shared_features[self._group.rank])
            self._shared = [
                linear(hidden_size, 2 * features), linear(spec.shared_ffn_size, outputs)
            ]  # fmt: skip

    def _parts(self, total: int) -> tuple[range, ...]:
        parts = even_parts(total, self._group.size)
        if not parts[-1]:
            raise InvalidInputError(
                "parallel.size", self._group.size, f"is too many for experts of {total} features"
            )
        return parts

    def __call__(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        """The MLP's output [T, E] for normed input, to add to the residual. T may be zero."""
        own = slice(None)
        if self._rows.size > 1:
            hidden_TE, own = gather_rows(self._rows, hidden_TE)
        spec = self.spec
        logits_TN1 = self.router(hidden_TE.to(self.router.dtype))
        experts_TX, weights_TX = route(
            logits_TN1[:, : spec.num_experts],
            spec.experts_per_token,
            spec.normalizes,
            spec.groups,
            self._bias_N,
        )
        if routes is not None:
            routes.record(self.index, experts_TX[own])
        groups = group_rows(experts_TX, spec.num_experts)
        left_out = self.left_out_tiles
        inner_SF = self._activation(self.gate_up(hidden_TE, groups, left_out))
        inner_SF = self._group.all_gather_columns(inner_SF, self._features)
        outputs_SE = self.down(inner_SF, groups, left_out)
        outputs_TXE = outputs_SE.view(*experts_TX.shape, self.down.out_features)
        if self._shared:
            shared_gate_up, shared_down = self._shared
            inner_TF = silu_mul(shared_gate_up(hidden_TE))
            inner_TF = self._group.all_gather_columns(inner_TF, self._shared_features)
            gate_T = logits_TN1[:, spec.num_experts] if self._has_gate else None
            out_TE = combine_experts(outputs_TXE, weights_TX, shared_down(inner_TF), gate_T)
        else:
            out_TE = combine_experts(outputs_TXE, weights_TX)
        return self._group.all_gather_columns(out_TE, self._outputs)[own]

    @property
    def left_out_tiles(self) -> frozenset[Tile]:
        """Tiles that no product of the model's dtype uses."""
        return (self._shared[0] if self._shared else self.router).left_out_tiles

    def linears(self) -> list[Linear]:
        """The layer's `Linear`s: on a GPU without those of the experts, which are one tensor."""
        return [self.router, *self._shared, *self.gate_up.linears(), *self.down.linears()]

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to ``linears``."""
        bias = [] if self._bias_N is None else [self._bias_N]
        return [*bias, *self.gate_up.plain_weights(), *self.down.plain_weights()]

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. ``at``: their prefix, such as model.layers.0.mlp.

        Experts have loaders one by one, and fused ones for transformers' layout in memory and
        published Qwen3.5-MoE checkpoints: gate_up_proj [N, 2 F, E], down_proj [N, E, F].
        """
        count, group = self.spec.num_experts, self._group
        found = {f"{at}.gate.weight": self.router.weight_rows(0, count)}
        if self._bias_N is not None:
            found[f"{at}.gate.e_score_correction_bias"] = WeightLoader.of(self._bias_N)
        features = len(self._features[group.rank])
        gates, ups, downs = (
            [f"{at}.experts.{expert}.{name}.weight" for expert in range(count)]
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        for expert in range(count):
            gate = self.gate_up.weight_rows(expert, 0, features)
            up = self.gate_up.weight_rows(expert, features, 2 * features)
            down = self.down.weight_rows(expert, 0, self.down.out_features)
            found[gates[expert]] = shard_of(gate, group, self._features)
            found[ups[expert]] = shard_of(up, group, self._features)
            found[downs[expert]] = shard_of(down, group, self._outputs)
        gate_up, down = self.gate_up.all_weights((*gates, *ups)), self.down.all_weights(downs)
        ffn = self._features[-1].stop
        both = [(part, range(ffn + part.start, ffn + part.stop)) for part in self._features]
        found[f"{at}.experts.gate_up_proj"] = shard_of(gate_up, group, both, dim=1)
        found[f"{at}.experts.down_proj"] = shard_of(down, group, self._outputs, dim=1)
        if self._has_gate:
            found[f"{at}.shared_expert_gate.weight"] = self.router.weight_rows(count, count + 1)
        if self._shared:
            found |= self._shared_loaders(f"{at}.shared_expert{'' if self._has_gate else 's'}")
        return found

    def _shared_loaders(self, at: str) -> dict[str, WeightLoader]:
        gate_up, down = self._shared
        features = len(self._shared_features[self._group.rank])
        parts = {
            "gate_proj": self._shared_features,
            "up_proj": self._shared_features,
            "down_proj": self._outputs,
        }
        found = linear_weight_loaders(at, gate_up, {"gate_proj": features, "up_proj": features})
        found |= linear_weight_loaders(at, down, {"down_proj": down.out_features})
        return shards_of(found, self._group, parts)
