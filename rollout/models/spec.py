"""ModelSpec: a model's config.json, checked against what is implemented."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from rollout.models.config_fields import dtype_field, token_ids
from rollout.models.deepseek_config import FAMILY, LATENT, LatentSpec, deepseek_fields
from rollout.models.experts_config import ExpertsSpec, LinearAttentionSpec, experts_spec, size
from rollout.models.hybrid_config import (
    HYBRIDS,
    VISION,
    decoder_names,
    linear_attention_spec,
    plain_rope,
    text_config,
)
from rollout.models.layers.rope import RopeSpec
from rollout.models.rope_config import context_limit, rope_spec

# Fields that change the arithmetic, with the values that leave it as implemented.
_IMPLEMENTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "compression_config": (None,),
    "dual_chunk_attention_config": (None,),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


_MTP_LAYERS = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's shape and options."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_norm_eps: float
    rope: RopeSpec
    max_context_len: int  # positions: the caller's number, else the checkpoint's
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype | None  # of the checkpoint; None: not in config.json
    num_mtp_layers: int = 0  # MTP layers after the target's own
    linear_attention: LinearAttentionSpec | None = None  # None: every layer is full attention
    experts: ExpertsSpec | None = None  # None: every MLP is dense
    rotary_dim: int  # first dimensions of a head, which are rotated
    latent: LatentSpec | None = None  # None: a token's heads have keys and values of their own
    attention_multiplier: float | None = None  # scales scores; None: by head_dim
    gated_attention: bool = False  # attention's output is scaled by a gate of its input
    norm_unit_offset: bool = False  # norms multiply by 1 + weight, except those after a gate
    decoder_names: tuple[str, ...] = ("model",)  # prefixes of tensor names, its own first

    whole: ModelSpec | None = None  # the model of which this is a rank's part; None: itself

    @property
    def entire(self) -> ModelSpec:
        """The spec of the model that all ranks run together."""
        return self if self.whole is None else self.whole

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with full attention, which store keys and values."""
        linear = () if self.linear_attention is None else self.linear_attention.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in linear)

    @property
    def attention_scale(self) -> float:
        """The factor of products of queries and keys."""
        given = self.attention_multiplier
        return self.head_dim**-0.5 if given is None else given

    def passes_over(self, name: str) -> bool:
        """Whether to skip a tensor of a checkpoint or trainer: an MTP head, a vision tower, or the
        rotary frequencies that some checkpoints hold although their config says them."""
        is_vision = self.architecture in HYBRIDS and name.startswith(VISION)
        is_skipped = is_vision or name.endswith(".rotary_emb.inv_freq")
        return is_skipped or is_mtp_tensor(name, self.num_layers, self.num_mtp_layers)

    @staticmethod
    def read(folder: Path, max_context_len: int | None = None) -> ModelSpec:
        """Read config.json, and end-of-sequence tokens of generation_config.json.

        Raises CheckpointError if a file or field is missing or malformed, UnsupportedModelError if
        a field asks for what is not implemented, InvalidInputError if ``max_context_len`` exceeds
        the checkpoint's positions.
        """
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        extra_eos = read_json(generation).get("eos_token_id") if generation.exists() else None
        return ModelSpec.of(config, extra_eos, max_context_len)

    @staticmethod
    def of(
        config: Mapping[str, Any], extra_eos: object = None, max_context_len: int | None = None
    ) -> ModelSpec:
        """The spec of a config's values. Raises what `read` raises."""
        return _spec(config, extra_eos, max_context_len)


def read_json(path: Path, whose: str = "a model folder") -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError; ``whose``: the owner named in its text."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; {whose} needs one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}, not an object")
    return values


def _spec(config: Mapping[str, Any], extra_eos: object, requested_context: int | None) -> ModelSpec:
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    is_hybrid, rotated_part = architecture in HYBRIDS, 1.0
    own_fields: dict[str, Any] = {}
    if is_hybrid:
        config, rotated_part = plain_rope(text_config(config))
    elif architecture in FAMILY:
        config, own_fields = deepseek_fields(str(architecture), config)
        rotated_part = own_fields.pop("rotated_part", 1.0)
    qkv_bias, o_bias, mlp_bias = _biases(architecture, config)
    for name, values in _IMPLEMENTED.items():
        if name in config and config[name] not in values:
            raise UnsupportedModelError(
                f"config.json: {name}={config[name]!r} is not implemented; "
                f"only {' or '.join(map(repr, values))}"
            )

    num_heads = size(config, "num_attention_heads")
    num_kv_heads = size(config, "num_key_value_heads", num_heads)
    hidden_size = size(config, "hidden_size")
    # Some families have a default head_dim; elsewhere the heads share the hidden size.
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    head_dim = size(config, "head_dim", 256 if is_hybrid else default_head_dim)
    rotary_dim = own_fields.pop("rotary_dim", int(head_dim * rotated_part))
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    if rotary_dim % 2 or not rotary_dim:
        raise CheckpointError(
            f"config.json: head_dim={head_dim} has {rotary_dim} dimensions to rotate; their number "
            "must be even and >= 2"
        )

    positions = size(config, "max_position_embeddings")
    rope = rope_spec(config, positions)
    limit = context_limit(rope, positions)
    max_context_len = positions if requested_context is None else requested_context
    if not 1 <= max_context_len <= limit:
        raise InvalidInputError(
            "model.max_context_len", max_context_len, f"the checkpoint's positions end at {limit}"
        )
    num_layers = size(config, "num_hidden_layers")
    experts = own_fields.pop("experts", None) or experts_spec(config, architecture)
    is_all_sparse = experts is not None and len(experts.layers) == num_layers
    has_qk_norm = is_hybrid or architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    linear_attention = None
    if is_hybrid:
        linear_attention = linear_attention_spec(config, str(architecture))
    else:
        _refuse_sliding_window(config, architecture, num_layers, max_context_len)

    return ModelSpec(
        architecture=str(architecture),
        vocab_size=size(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=size(config, "moe_intermediate_size" if is_all_sparse else "intermediate_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_context_len=max_context_len,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=own_fields.pop("qk_norm", has_qk_norm),
        eos_token_ids=token_ids(config.get("eos_token_id"), extra_eos),
        dtype=dtype_field(config.get("dtype", config.get("torch_dtype"))),
        num_mtp_layers=size(config, _MTP_LAYERS) if config.get(_MTP_LAYERS) else 0,
        linear_attention=linear_attention,
        experts=experts,
        rotary_dim=rotary_dim,
        gated_attention=is_hybrid,
        norm_unit_offset=is_hybrid,
        decoder_names=decoder_names(str(architecture)),
        **own_fields,
    )


def _biases(architecture: object, config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether the qkv, output and MLP projections have biases."""
    attention = bool(config.get("attention_bias", False))
    match architecture:
        case "LlamaForCausalLM":
            return attention, attention, bool(config.get("mlp_bias", False))
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
    raise UnsupportedModelError(
        f"config.json: architectures={config.get('architectures')!r} is not implemented; only "
        "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
        "Qwen3MoeForCausalLM, MiMoForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForCausalLM, "
        "Qwen3_5MoeForCausalLM, Qwen3_5ForConditionalGeneration, "
        f"Qwen3_5MoeForConditionalGeneration, {' and '.join(sorted(FAMILY))} are"
    )


def _refuse_sliding_window(
    config: Mapping[str, Any], architecture: object, num_layers: int, max_context_len: int
) -> None:
    """Raise if a sliding window shorter than the context is in use."""
    layer_types = config.get("layer_types")
    for kind in layer_types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}: not implemented")
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM"):
        slides = bool(config.get("use_sliding_window", False))
        slides &= config.get("max_window_layers", 28) < num_layers
        default: int | None = 4096
    elif architecture == "Qwen3MoeForCausalLM":  # all layers slide or none does
        slides = bool(config.get("use_sliding_window", False))
        default = 4096
    else:
        slides = True
        default = 4096 if architecture == "MistralForCausalLM" else None
    if layer_types is not None:
        slides &= "sliding_attention" in layer_types
    window = config.get("sliding_window", default)
    if slides and window is not None and window < max_context_len:
        raise UnsupportedModelError(
            f"config.json: sliding_window={window} is not implemented; with "
            f"model.max_context_len <= {window} it hides nothing and the model can be used"
        )


_MTP = re.compile(r"mtp\.|model\.mtp\.|model\.mtp_layers\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_mtp_tensor(name: str, num_layers: int, num_mtp_layers: int) -> bool:
    """Whether a tensor belongs to an MTP head and not to the target itself.

    In DeepSeek-V3's layout the heads are the ``num_mtp_layers`` layers after the target's
    ``num_layers``.
    """
    layer = _LAYER.match(name)
    is_after = layer is not None and 0 <= int(layer[1]) - num_layers < num_mtp_layers
    return is_after or bool(_MTP.match(name))
