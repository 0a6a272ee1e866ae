"""gpt-oss (OpenAI 2025): attention with sinks, experts with biases.

Windows and the clamped SwiGLU are in the ModelSpec.

Legend: N experts, H query heads, I input, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rollout.models.attention import Attention
from rollout.models.causal_lm import CausalLM
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.experts_config import ExpertsSpec
from rollout.models.head_parts import HeadParts
from rollout.models.layers.experts import Experts
from rollout.models.layers.grouped_linear import GroupedLinear
from rollout.models.layers.shard import shard_of
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec


class SinkAttention(Attention):
    """Attention with a sink per head, stored in float32."""

    def __init__(self, spec: ModelSpec, weights: WeightFactory, **options: Any) -> None:
        super().__init__(spec, weights, **options)
        self.sinks_H = weights.tensor(spec.num_heads, dtype=torch.float32)
        self.variant = replace(self.variant, sinks_H=self.sinks_H)

    def plain_weights(self) -> list[torch.Tensor]:
        return [*super().plain_weights(), self.sinks_H]

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        heads = HeadParts.of(self.spec.entire, self._group.size).queries
        sinks = shard_of(WeightLoader.of(self.sinks_H), self._group, heads)
        return super().weight_loaders(at) | {f"{at}.sinks": sinks}


class GptOssExperts(Experts):
    """A sparse MLP with biases. Checkpoints store all experts of a product in one tensor, inputs
    before outputs, whose gate and up features alternate."""

    def __init__(
        self, spec: ExpertsSpec, index: int, weights: WeightFactory, **options: Any
    ) -> None:
        super().__init__(spec, index, weights, bias=True, **options)

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        features = len(self._features[self._group.rank])
        gate_up = self._loaders(self.gate_up, [(0, features), (features, 2 * features)])
        down = self._loaders(self.down, [(0, self.down.out_features)])
        return {
            f"{at}.router.weight": self.router.weight_rows(0, self.spec.num_experts),
            f"{at}.router.bias": self.router.bias_rows(0, self.spec.num_experts),
            f"{at}.experts.gate_up_proj": _alternating([weights for weights, _ in gate_up]),
            f"{at}.experts.gate_up_proj_bias": _alternating([biases for _, biases in gate_up]),
            f"{at}.experts.down_proj": _alternating([weights for weights, _ in down]),
            f"{at}.experts.down_proj_bias": _alternating([biases for _, biases in down]),
        }

    def _loaders(
        self, product: GroupedLinear, rows: Sequence[tuple[int, int]]
    ) -> list[tuple[list[WeightLoader], list[WeightLoader]]]:
        """Loaders of these rows of each expert's weight, and of its bias."""
        parts = self._features if product is self.gate_up else self._outputs

        def shard(own: WeightLoader) -> WeightLoader:
            return shard_of(own, self._group, parts)

        return [
            (
                [shard(product.weight_rows(expert, *each)) for each in rows],
                [shard(product.bias_rows(expert, *each)) for each in rows],
            )
            for expert in range(self.spec.num_experts)
        ]


def _alternating(experts: Sequence[Sequence[WeightLoader]]) -> WeightLoader:
    """A loader of weights [N, I, P O] or biases [N, P O] whose outputs alternate between P parts.

    ``experts``: the parts of each expert, [O, I] or [O].
    """
    first, count = experts[0][0], len(experts[0])

    def write(values: torch.Tensor) -> None:
        for parts, of_expert in zip(experts, values, strict=True):
            for index, part in enumerate(parts):
                part.write(of_expert.movedim(-1, 0)[index::count])

    def read() -> torch.Tensor:
        wholes = [torch.stack([part.read() for part in parts], dim=1) for parts in experts]
        return torch.stack([whole.flatten(0, 1).movedim(0, -1) for whole in wholes])

    return replace(
        first,
        shape=(len(experts), *first.shape[1:], count * first.shape[0]),
        write=write,
        read=read,
        shard=None,  # made of many
    )


class GptOssLayer(DecoderLayer):
    """A decoder layer whose attention has sinks, and whose experts have biases."""

    attention_class = SinkAttention
    experts_class = GptOssExperts


class GptOss(CausalLM):
    """A gpt-oss model."""

    layer_class = GptOssLayer
