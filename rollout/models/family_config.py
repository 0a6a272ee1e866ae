"""Reads from config.json what differs from one attention family to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.config_fields import refuse_unimplemented, size
from rollout.models.deepseek_config import FAMILY, LATENT
from rollout.models.hybrid_config import HYBRIDS
from rollout.models.layers.rope import RopeSpec
from rollout.models.rope_config import rope_spec, without_partial_rotary
from rollout.ops.glu import clamped_silu_mul, gelu_mul

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
        case "Glm4MoeForCausalLM":
            return attention, False, False
    if architecture in HYBRIDS | LATENT:
        return attention, attention, False
    if architecture == "LlamaForCausalLM" or architecture in _FAMILIES:
        return attention, attention, bool(config.get("mlp_bias", False))
    raise UnsupportedModelError(
        f"config.json: architectures={config.get('architectures')!r} is not implemented; only "
        "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
        "Qwen3MoeForCausalLM, MiMoForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForCausalLM, "
        "Qwen3_5MoeForCausalLM, Qwen3_5ForConditionalGeneration, "
        f"Qwen3_5MoeForConditionalGeneration, {', '.join(map(str, (*_FAMILIES, *FAMILY)))} are"
    )


def _positive(config: Fields, name: str, default: float) -> float:
    """Take a field out that must be a number > 0."""
    value = config.pop(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: {name}={value!r} must be a number > 0")
    return float(value)


def _phi3(config: Fields) -> Fields:
    whole, part = without_partial_rotary(config, 1.0)
    config.pop("partial_rotary_factor", None)
    config.update(whole)
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field)
        if isinstance(rope, dict) and rope.get("type") in ("su", "yarn"):  # before "longrope"
            config[field] = rope | {"type": "longrope"}
    return {"rotated_part": part}


def _olmo(config: Fields) -> Fields:
    return {"qk_norm": True}


def _olmo3(config: Fields) -> Fields:
    _fill_layer_types(config, 4)
    return {"qk_norm": True, "local_rope": _local_rope(config, config["rope_theta"])}


def _gemma(config: Fields) -> Fields:
    refuse_unimplemented(config, {"hidden_activation": ("gelu_pytorch_tanh",)})
    config.pop("hidden_activation", None)
    config.pop("hidden_act", None)  # the name of the former in other families
    return {
        "activation": gelu_mul,
        "norm_unit_offset": True,
        "embedding_scale": size(config, "hidden_size") ** 0.5,
        "attention_multiplier": _positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        "logit_soft_cap": _optional(config, "final_logit_softcapping"),
    }


def _gemma2(config: Fields) -> Fields:
    _fill_layer_types(config, 2)
    return {"attention_soft_cap": _optional(config, "attn_logit_softcapping"), **_gemma(config)}


def _gemma3(config: Fields) -> Fields:
    pattern = size(config, "_sliding_window_pattern", 6)
    _fill_layer_types(config, size(config, "sliding_window_pattern", pattern))
    local_rope = _local_rope(config, config.pop("rope_local_base_freq", 1e4))
    return {"qk_norm": True, "local_rope": local_rope, **_gemma(config)}


@dataclass(frozen=True, slots=True)
class ClampedSilu:
    """`clamped_silu_mul` with its constants."""

    alpha: float
    limit: float

    def __call__(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        return clamped_silu_mul(gate_up_T2F, self.alpha, self.limit)


def _gpt_oss(config: Fields) -> Fields:
    _fill_layer_types(config, 2)
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and quantised.get("quant_method") == "mxfp4":
        del config["quantization_config"]  # its weights are read into bfloat16
    config["moe_intermediate_size"] = size(config, "intermediate_size")
    alpha = _positive(config, "swiglu_alpha", 1.702)
    return {"activation": ClampedSilu(alpha, _positive(config, "swiglu_limit", 7.0))}


def _fill_layer_types(config: Fields, interval: int) -> None:
    """Fill in layer types that are missing: every ``interval``-th layer has full attention."""
    if config.get("layer_types") is None:
        config["layer_types"] = [
            "sliding_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(size(config, "num_hidden_layers"))
        ]


def _local_rope(config: Fields, theta: float) -> RopeSpec:
    """The rope of layers with a window, by ``theta`` in layouts before transformers 5.

    Leaves that of the other layers in the config.
    """
    ropes = config.get("rope_parameters")
    local: Mapping[str, Any] = {"rope_theta": theta}
    if isinstance(ropes, Mapping) and "sliding_attention" in ropes:
        local = {"rope_parameters": ropes["sliding_attention"]}
        config["rope_parameters"] = ropes.get("full_attention")
    return rope_spec(local, size(config, "max_position_embeddings"))


def _optional(config: Fields, name: str) -> float | None:
    """Take a field out that must be null or a number > 0."""
    return None if config.get(name) is None else _positive(config, name, 1.0)


def _granite(config: Fields) -> Fields:
    return {
        "embedding_scale": _positive(config, "embedding_multiplier", 1.0),
        "residual_scale": _positive(config, "residual_multiplier", 1.0),
        "attention_multiplier": _positive(config, "attention_multiplier", 1.0),
        "logit_divisor": _positive(config, "logits_scaling", 1.0),
    }


def _granite_hybrid(config: Fields) -> Fields:
    """The fields of a Granite 4 without recurrent layers and experts."""
    refuse_unimplemented(config, _IMPLEMENTED_OF_GRANITE_4)
    for kind in config.pop("layer_types", None) or ["mamba"]:
        if kind not in ("attention", "full_attention"):
            raise UnsupportedModelError(
                f"config.json: layer_types has {kind!r}: not implemented for Granite"
            )
    config["intermediate_size"] = size(config, "shared_intermediate_size")
    return _granite(config)


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
    unrotated = tuple(layer for layer in layers if not rotated[layer])
    if config.get("layer_types") is None:
        config["layer_types"] = [
            "sliding_attention" if layer in unrotated else "full_attention" for layer in layers
        ]
    return {"unrotated_layers": unrotated}


_IMPLEMENTED_OF_GRANITE_4: Mapping[str, tuple[object, ...]] = {
    "num_local_experts": (0,),
    "position_embedding_type": ("rope",),
    "normalization_function": ("rmsnorm",),
}
_GEMMA = {
    "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096, "num_key_value_heads": 4
}  # fmt: skip
_GPT_OSS = {
    "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "head_dim": 64, "sliding_window": 128,
    "attention_bias": True,
}  # fmt: skip
_CAPS = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}


_FAMILIES: Mapping[object, tuple[Mapping[str, Any], Callable[[Fields], Fields] | None]] = (
    MappingProxyType(
        {
            "MinistralForCausalLM": ({"sliding_window": 4096}, None),
            "Phi3ForCausalLM": ({"rms_norm_eps": 1e-5}, _phi3),
            "Olmo2ForCausalLM": ({"rms_norm_eps": 1e-5}, _olmo),
            "Olmo3ForCausalLM": (
                {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
                _olmo3,
            ),
            "GraniteForCausalLM": ({}, _granite),
            "GraniteMoeHybridForCausalLM": ({}, _granite_hybrid),
            "GptOssForCausalLM": (_GPT_OSS, _gpt_oss),
            "Gemma2ForCausalLM": (_GEMMA | _CAPS, _gemma2),
            "Gemma3ForCausalLM": (_GEMMA | {"rope_theta": 1e6}, _gemma3),
            "SmolLM3ForCausalLM": ({"rope_theta": 2e6, "tie_word_embeddings": True}, _smollm3),
        }
    )
)
"""By architecture: defaults of config.json, and the reader of the family's own fields."""
