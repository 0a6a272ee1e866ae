"""The spec of sparse layers, and reading it from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import CheckpointError
from rollout.models.config_fields import size
from rollout.ops.routing import PLAIN, Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Sparse layers: a router and experts instead of one MLP."""

    layers: tuple[int, ...]  # indices in the model
    num_experts: int
    experts_per_token: int
    ffn_size: int  # of one expert
    shared_ffn_size: int = 0  # of an expert that runs for every token; 0: none
    shared_gate: bool = True  # whether the shared expert's output has a gate
    normalizes: bool = True  # whether the chosen experts' probabilities are scaled to add up to 1
    groups: Groups = PLAIN  # limits on the choice
    exact_router: bool = False  # the router's product is in float32, whatever the model's dtype
    correction_bias: bool = False  # a correction bias has a part in the choice


_NORMALIZES = {
    "Qwen3MoeForCausalLM": False,
    "Qwen3NextForCausalLM": True,
    "Qwen3_5MoeForCausalLM": True,
    "Qwen3_5MoeForConditionalGeneration": True,
    "GptOssForCausalLM": True,
}
"""Architectures with experts, and their default of norm_topk_prob."""


def experts_spec(config: Mapping[str, Any], architecture: object) -> ExpertsSpec | None:
    """The spec of experts, or None if every MLP is dense.

    Raises CheckpointError for missing or malformed fields. `deepseek_config` reads DeepSeek's.
    """
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
    """Every ``decoder_sparse_step``-th layer, except those in ``mlp_only_layers``."""
    step = size(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    layers = range(size(config, "num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
