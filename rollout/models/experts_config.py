"""Reads what a config.json says of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import CheckpointError
from rollout.models.config_fields import size
from rollout.models.layer_spec import ExpertsSpec

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
