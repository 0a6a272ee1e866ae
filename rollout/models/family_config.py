"""Reads from config.json what differs from one attention family to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.experts_config import size
from rollout.models.hybrid_config import HYBRIDS

Fields = dict[str, Any]
"""Fields of the ModelSpec; ``rotated_part`` stands for ``rotary_dim``."""


def family_fields(architecture: object, config: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """The config with the family's defaults and without what only this family reads, and the spec's
    fields that follow from the latter.

    What stays in the config must be what every family means by it.
    """
    defaults, read = _FAMILIES.get(architecture, ({}, None))
    config = {**defaults, **config}
    return config, {} if read is None else read(config)


def biases(architecture: object, config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether the qkv, output and MLP projections have biases."""
    attention = bool(config.get("attention_bias", False))
    match architecture:
        case "MistralForCausalLM":
            return False, False, False
        case "Qwen2ForCausalLM" | "MiMoForCausalLM":
            return True, False, False
        case "Qwen3ForCausalLM" | "Qwen3MoeForCausalLM":
            return attention, attention, False
    if architecture in HYBRIDS:
        return attention, attention, False
    if architecture == "LlamaForCausalLM" or architecture in _FAMILIES:
        return attention, attention, bool(config.get("mlp_bias", False))
    raise UnsupportedModelError(
        f"config.json: architectures={config.get('architectures')!r} is not implemented; only "
        "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
        "Qwen3MoeForCausalLM, MiMoForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForCausalLM, "
        "Qwen3_5MoeForCausalLM, Qwen3_5ForConditionalGeneration, "
        f"Qwen3_5MoeForConditionalGeneration, {', '.join(_FAMILIES)} are"
    )


def _positive(config: Fields, name: str, default: float) -> float:
    """Take a field out that must be a number > 0."""
    value = config.pop(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: {name}={value!r} must be a number > 0")
    return float(value)


def _phi3(config: Fields) -> Fields:
    part: object = config.pop("partial_rotary_factor", 1.0)
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(given := config.get(field), Mapping):
            part = given.get("partial_rotary_factor", part)
            rope = {name: given[name] for name in given if name != "partial_rotary_factor"}
            if rope.get("type") in ("su", "yarn"):  # names before "longrope"
                rope["type"] = "longrope"
            config[field] = rope
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise CheckpointError(f"config.json: partial_rotary_factor={part!r} must be in (0, 1]")
    return {"rotated_part": part}


def _olmo(config: Fields) -> Fields:
    return {"qk_norm": True}


def _granite(config: Fields) -> Fields:
    return {
        "embedding_scale": _positive(config, "embedding_multiplier", 1.0),
        "residual_scale": _positive(config, "residual_multiplier", 1.0),
        "attention_multiplier": _positive(config, "attention_multiplier", 1.0),
        "logit_divisor": _positive(config, "logits_scaling", 1.0),
    }


def _smollm3(config: Fields) -> Fields:
    layers = range(size(config, "num_hidden_layers"))
    interval = size(config, "no_rope_layer_interval", 4)
    rotated = config.pop("no_rope_layers", None)  # 1 for each layer that has a rope
    if rotated is None:
        rotated = [(layer + 1) % interval for layer in layers]
    if not isinstance(rotated, list) or len(rotated) < len(layers):
        raise CheckpointError(
            f"config.json: no_rope_layers={rotated!r} must have an entry for each layer"
        )
    return {"unrotated_layers": tuple(layer for layer in layers if not rotated[layer])}


_FAMILIES: Mapping[object, tuple[Mapping[str, Any], Callable[[Fields], Fields] | None]] = (
    MappingProxyType(
        {
            "Phi3ForCausalLM": ({"rms_norm_eps": 1e-5}, _phi3),
            "Olmo2ForCausalLM": ({"rms_norm_eps": 1e-5}, _olmo),
            "GraniteForCausalLM": ({}, _granite),
            "SmolLM3ForCausalLM": ({"rope_theta": 2e6, "tie_word_embeddings": True}, _smollm3),
        }
    )
)
"""By architecture: defaults of config.json, and the reader of the family's own fields."""
