"""ModelSpec: a model's config.json, checked against what is implemented."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.config_fields import dtype_field, refuse_unimplemented, size, token_ids
from rollout.models.deepseek_config import FAMILY, LatentSpec, deepseek_fields
from rollout.models.experts_config import ExpertsSpec, experts_spec
from rollout.models.family_config import biases, family_fields
from rollout.models.hybrid_config import (
    HYBRIDS,
    VISION,
    LinearAttentionSpec,
    decoder_names,
    linear_attention_spec,
    plain_rope,
    text_config,
)
from rollout.models.layers.rope import RopeSpec
from rollout.models.rope_config import check_factors, context_limit, rope_spec
from rollout.models.window_config import sliding_window
from rollout.ops.glu import silu_mul

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
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, []),
    "use_bidirectional_attention": (None, False),
    "hidden_activation": (None, "silu"),
    "rope_local_base_freq": (None,),
    "swiglu_limit": (None,),
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
    gated_attention: bool = False  # attention's output is scaled by a gate of its input
    norm_unit_offset: bool = False  # norms multiply by 1 + weight, except those after a gate
    decoder_names: tuple[str, ...] = ("model",)  # prefixes of tensor names, its own first
    activation: Callable[[torch.Tensor], torch.Tensor] = silu_mul  # of gate and up columns
    unrotated_layers: tuple[int, ...] = ()  # layers without rope
    local_layers: tuple[int, ...] = ()  # layers that attend within the window
    window: int | None = None  # keys that a row of these sees at most; None: all
    local_rope: RopeSpec | None = None  # of these layers; None: as the others
    attention_multiplier: float | None = None  # scales scores; None: by head_dim
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer's halves add to the residual
    logit_divisor: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    whole: ModelSpec | None = None  # the model that all ranks run, if this is one rank's part

    @property
    def entire(self) -> ModelSpec:
        """The spec of the model that all ranks run together."""
        return self if self.whole is None else self.whole

    def rope_of(self, layer: int) -> RopeSpec | None:
        """The rotary embedding of a layer. None: it has none."""
        if layer in self.unrotated_layers:
            return None
        is_local = layer in self.local_layers and self.local_rope is not None
        return self.local_rope if is_local else self.rope

    def window_of(self, layer: int) -> int | None:
        """The keys that a row of a layer sees at most. None: all before it."""
        return self.window if layer in self.local_layers else None

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
    if is_hybrid:
        config, rotated_part = plain_rope(text_config(config))
    if architecture in FAMILY:
        config, own_fields = deepseek_fields(str(architecture), config)
    else:
        config, own_fields = family_fields(architecture, config)
    rotated_part = own_fields.pop("rotated_part", rotated_part)
    qkv_bias, o_bias, mlp_bias = biases(architecture, config)
    refuse_unimplemented(config, _IMPLEMENTED)

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
    check_factors(rope, rotary_dim)
    limit = context_limit(rope, positions)
    max_context_len = positions if requested_context is None else requested_context
    if not 1 <= max_context_len <= limit:
        raise InvalidInputError(
            "model.max_context_len", max_context_len, f"the checkpoint's positions end at {limit}"
        )
    num_layers = size(config, "num_hidden_layers")
    experts = own_fields.pop("experts", None) or experts_spec(config, architecture)
    is_all_sparse = experts is not None and len(experts.layers) == num_layers
    linear_attention = local_layers = window = None
    if is_hybrid:
        linear_attention = linear_attention_spec(config, str(architecture))
    else:
        local_layers, window = sliding_window(config, architecture, num_layers, max_context_len)

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
        qk_norm=own_fields.pop("qk_norm", is_hybrid or "Qwen3" in str(architecture)),
        eos_token_ids=token_ids(config.get("eos_token_id"), extra_eos),
        dtype=dtype_field(config.get("dtype", config.get("torch_dtype"))),
        num_mtp_layers=size(config, _MTP_LAYERS) if config.get(_MTP_LAYERS) else 0,
        linear_attention=linear_attention,
        experts=experts,
        rotary_dim=rotary_dim,
        gated_attention=is_hybrid,
        norm_unit_offset=own_fields.pop("norm_unit_offset", is_hybrid),
        local_layers=local_layers or (),
        window=window,
        decoder_names=decoder_names(str(architecture)),
        **own_fields,
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
