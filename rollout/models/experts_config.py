"""The specs of experts and of recurrent layers, and the reading of experts from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import CheckpointError
from rollout.models.config_fields import size


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """Gated delta rule layers (Yang et al. 2024, Gated Delta Networks), as Qwen3-Next has them."""

    layers: tuple[int, ...]  # which of the model's layers; the others are full attention
    num_key_heads: int  # H; query heads are as many
    num_value_heads: int  # G, a multiple of H: value head g reads key head g // (G // H)
    key_dim: int  # K, of one head; queries' too
    value_dim: int  # V, of one head
    conv_width: int  # W: taps of the convolution before
    interleaved: bool = False  # checkpoints keep the input projections key head by key head

    @property
    def channels(self) -> int:
        """C: queries, keys and values, which are convolved together, in this order."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Sparse layers: a router and experts instead of one MLP."""

    layers: tuple[int, ...]  # which of the model's layers
    num_experts: int
    experts_per_token: int
    ffn_size: int  # of one expert
    shared_ffn_size: int = (
        0  # of an expert that every token passes, with a gate of its own; 0: none
    )
    normalizes: bool = True  # whether the chosen experts' probabilities are scaled to add up to 1


_NORMALIZES = {
    "Qwen3MoeForCausalLM": False,
    "Qwen3NextForCausalLM": True,
    "Qwen3_5MoeForCausalLM": True,
    "Qwen3_5MoeForConditionalGeneration": True,
}
"""Architectures with experts, and what norm_topk_prob is where their config does not say."""


def experts_spec(config: Mapping[str, Any], architecture: object) -> ExpertsSpec | None:
    """None where every MLP is dense. Raises CheckpointError for missing or malformed fields."""
    if architecture not in _NORMALIZES:
        return None
    count_field = "num_experts" if "num_experts" in config else "num_local_experts"
    layers = _sparse_layers(config)
    if not layers or config.get(count_field) == 0:
        return None
    shared = "shared_expert_intermediate_size"
    spec = ExpertsSpec(
        layers=layers,
        num_experts=size(config, count_field),
        experts_per_token=size(config, "num_experts_per_tok"),
        ffn_size=size(config, "moe_intermediate_size"),
        shared_ffn_size=size(config, shared) if config.get(shared) else 0,
        normalizes=bool(config.get("norm_topk_prob", _NORMALIZES[architecture])),
    )
    if spec.experts_per_token > spec.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok={spec.experts_per_token} of {count_field}="
            f"{spec.num_experts}"
        )
    return spec


def _sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Each that is the last of ``decoder_sparse_step`` and not named in ``mlp_only_layers``."""
    step = size(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    layers = range(size(config, "num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
