"""Reads the fields of config.json that DeepSeek's models have, and the GLM MoE models after them.

Sources: DeepSeek-V2 and DeepSeek-V3 (DeepSeek-AI 2024), GLM-4.5 (Zhipu AI 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.config_fields import refuse_unimplemented, size
from rollout.models.experts_config import ExpertsSpec
from rollout.models.layers.rope import yarn_magnitude
from rollout.models.rope_config import rope_spec, without_partial_rotary
from rollout.ops.routing import Groups

GLM_MOE = "Glm4MoeForCausalLM"
_V2, _V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_GLM_LITE = "Glm4MoeLiteForCausalLM"
LATENT = frozenset({_V2, _V3, _GLM_LITE})
FAMILY = LATENT | {GLM_MOE}

_READ = frozenset(
    {
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters",
        "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
        "attention_bias", "moe_intermediate_size", "num_experts_per_tok",
        "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor",
        "n_group", "topk_group", "norm_topk_prob", "scoring_func", "topk_method", "moe_layer_freq",
        "eos_token_id", "dtype", "torch_dtype", "num_nextn_predict_layers", "quantization_config",
    }
)  # fmt: skip
_READ_OF_LATENT = frozenset(
    {
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "qk_head_dim",  # the sum of two others
    }
)  # fmt: skip
_READ_OF = {
    GLM_MOE: frozenset({"use_qk_norm"}),
    _V2: _READ_OF_LATENT | {"mlp_bias"},
    _V3: _READ_OF_LATENT | {"rope_interleave"},
    _GLM_LITE: _READ_OF_LATENT | {"rope_interleave", "mlp_layer_types"},
}
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id",
        "chunk_size_feed_forward", "ep_size", "id2label", "initializer_range", "label2id",
        "output_router_logits", "pad_token_id", "pretraining_tp", "return_dict", "seq_aux",
        "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Fields of training and of transformers itself."""

_IMPLEMENTED: Mapping[str, tuple[object, ...]] = {
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    "mlp_bias": (False, None),
}
_IMPLEMENTED_OF_V2: Mapping[str, tuple[object, ...]] = {
    **_IMPLEMENTED,
    "scoring_func": ("softmax", None),
    "topk_method": ("greedy", "group_limited_greedy", None),
    "norm_topk_prob": (False, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention. Its queries and keys have ``rotary_dim`` dims more."""

    rank: int  # dims of a token's latent
    query_rank: int | None  # dims of a row's latent for queries; None: queries have none
    plain_dim: int  # dims of a head's query that are not rotated
    value_dim: int  # dims of a head's output
    interleaved: bool  # checkpoints have rotated dims in pairs instead of halves


def deepseek_fields(
    architecture: str, config: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The config as other families mean its fields, and the fields of ModelSpec that follow from
    those that only this family has. ``rotated_part`` stands for ``rotary_dim``.

    Raises CheckpointError for missing or malformed fields, UnsupportedModelError for what is not
    implemented.
    """
    _check_fields(config, architecture)
    fields: dict[str, Any] = {"experts": _experts(config, architecture)}
    if architecture == GLM_MOE:
        config, fields["rotated_part"] = without_partial_rotary(config, 0.5)
        return config, fields | {"qk_norm": bool(config.get("use_qk_norm", False))}
    latent, rotary_dim = _latent(config, architecture), size(config, "qk_rope_head_dim")
    scale = (latent.plain_dim + rotary_dim) ** -0.5
    rope = rope_spec(config, size(config, "max_position_embeddings"))
    if rope.mscale_all_dim:
        scale *= yarn_magnitude(rope.factor, rope.mscale_all_dim) ** 2
    fields |= {"latent": latent, "rotary_dim": rotary_dim, "attention_multiplier": scale}
    # One key for all heads.
    return {**config, "num_key_value_heads": 1, "head_dim": latent.rank + rotary_dim}, fields


def _check_fields(config: Mapping[str, Any], architecture: str) -> None:
    """Raise UnsupportedModelError, naming field and value, for one that is not read or that asks
    for what is not implemented."""
    implemented = _IMPLEMENTED_OF_V2 if architecture == _V2 else _IMPLEMENTED
    refuse_unimplemented(config, implemented, architecture)
    for name in sorted(config.keys() - _READ - _READ_OF[architecture] - _WITHOUT_EFFECT):
        if config[name] not in (None, False, "", [], {}):
            raise UnsupportedModelError(
                f"config.json: {name}={config[name]!r} is not implemented for {architecture}: no "
                "such field is known"
            )


def _latent(config: Mapping[str, Any], architecture: str) -> LatentSpec:
    heads, kv_heads = size(config, "num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads={kv_heads} is not implemented for latent attention; "
            f"only num_attention_heads={heads}"
        )
    return LatentSpec(
        rank=size(config, "kv_lora_rank"),
        query_rank=None if config.get("q_lora_rank") is None else size(config, "q_lora_rank"),
        plain_dim=size(config, "qk_nope_head_dim"),
        value_dim=size(config, "v_head_dim"),
        interleaved=architecture == _V2 or config.get("rope_interleave") is not False,
    )


def _experts(config: Mapping[str, Any], architecture: str) -> ExpertsSpec | None:
    layers = _sparse_layers(config, architecture)
    if not layers:
        return None
    is_v2 = architecture == _V2
    has_groups = not is_v2 or config.get("topk_method") == "group_limited_greedy"
    ffn_size, shared = size(config, "moe_intermediate_size"), size(config, "n_shared_experts")
    spec = ExpertsSpec(
        layers=layers,
        num_experts=size(config, "n_routed_experts"),
        experts_per_token=size(config, "num_experts_per_tok"),
        ffn_size=ffn_size,
        shared_ffn_size=shared * ffn_size,
        shared_gate=False,
        normalizes=_flag(config, "norm_topk_prob"),
        groups=Groups(
            sigmoid=not is_v2,
            count=size(config, "n_group", 1) if has_groups else 1,
            chosen=size(config, "topk_group", 1) if has_groups else 1,
            factor=_factor(config),
        ),
        exact_router=True,
        correction_bias=not is_v2,
    )
    _check_groups(spec)
    return spec


def _sparse_layers(config: Mapping[str, Any], architecture: str) -> tuple[int, ...]:
    """All layers after the first few, which are dense. GLM-4.7-Flash lists each layer's kind."""
    num_layers, kinds = size(config, "num_hidden_layers"), config.get("mlp_layer_types")
    if architecture != _GLM_LITE:
        return tuple(range(_at_least_0(config, "first_k_dense_replace"), num_layers))
    kinds = kinds or ["dense"] + ["sparse"] * (num_layers - 1)
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise CheckpointError(
            f"config.json: mlp_layer_types={kinds!r} must be dense or sparse for each of "
            f"{num_layers} layers"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    dense = config.get("first_k_dense_replace")
    if dense is not None and layers != tuple(range(dense, num_layers)):
        raise UnsupportedModelError(
            f"config.json: first_k_dense_replace={dense} is not what mlp_layer_types says"
        )
    return layers


def _check_groups(spec: ExpertsSpec) -> None:
    groups, experts = spec.groups, spec.num_experts
    in_group, rest = divmod(experts, groups.count)
    if rest or (groups.count > 1 and groups.sigmoid and in_group < 2):
        raise CheckpointError(
            f"config.json: n_group={groups.count} of n_routed_experts={experts}: groups must be of "
            "one size, and of two experts at least"
        )
    if groups.chosen > groups.count:
        raise CheckpointError(f"config.json: topk_group={groups.chosen} of n_group={groups.count}")
    if spec.experts_per_token > in_group * groups.chosen:
        raise CheckpointError(
            f"config.json: num_experts_per_tok={spec.experts_per_token} of the "
            f"{in_group * groups.chosen} experts in topk_group={groups.chosen} groups"
        )


def _at_least_0(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return 0 if value == 0 and not isinstance(value, bool) else size(config, name)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name}={value!r} must be true or false")
    return value


def _factor(config: Mapping[str, Any]) -> float:
    value = config.get("routed_scaling_factor")
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: routed_scaling_factor={value!r} must be > 0")
    return float(value)
