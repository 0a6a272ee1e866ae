"""Reads the fields of config.json that only Qwen3-Next and Qwen3.5 have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.config_fields import check_layer_types, refuse_unimplemented, size
from rollout.models.rope_config import without_partial_rotary

HYBRIDS = frozenset(
    {
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
VISION = ("model.visual.", "visual.")
"""Prefixes of tensors that a text model skips."""

_PARTIAL_ROTARY = 0.25  # the default
_NOT_OF_TEXT = frozenset({"mrope_section", "mrope_interleaved"})
_INTERVAL = 4  # the default: every fourth layer is full attention
_IMPLEMENTED: Mapping[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", None),
    "mtp_use_dedicated_embeddings": (False, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """Gated delta rule layers (Yang et al. 2024, Gated Delta Networks) as in Qwen3-Next."""

    layers: tuple[int, ...]  # indices in the model; the other layers are full attention
    num_key_heads: int  # H, also the number of query heads
    num_value_heads: int  # G, a multiple of H: value head g reads key head g // (G // H)
    key_dim: int  # K, of one head of keys or queries
    value_dim: int  # V, of one head
    conv_width: int  # W: taps of the convolution before the delta rule
    interleaved: bool = False  # checkpoints store the input projections key head by key head

    @property
    def channels(self) -> int:
        """C: channels of the convolution: queries, keys and values, in this order."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields: with ``text_config`` merged in, if there is one."""
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: text_config={nested!r} must be an object")
    # The outer config decides these two; for other fields the nested one has precedence.
    shared = ("architectures", "tie_word_embeddings")
    return {**config, **nested} | {name: config[name] for name in shared if name in config}


def decoder_names(architecture: str) -> tuple[str, ...]:
    """The decoder's prefixes in tensor names: this architecture's first, then its sibling's.

    A Qwen3.5 with a vision tower has its decoder one level deeper than one without. A trainer may
    use either for the same checkpoint.
    """
    if not architecture.startswith("Qwen3_5"):
        return ("model",)
    names = ("model.language_model", "model")
    return names if architecture.endswith("ForConditionalGeneration") else names[::-1]


def plain_rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """The config with a plain rotary embedding, and the part of a head that it rotates.

    Sections for time, height and width are removed: the three positions of text are equal.
    """
    whole, factor = without_partial_rotary(config, _PARTIAL_ROTARY)
    plain = dict(whole)
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(given := plain.get(field), Mapping):
            plain[field] = {name: given[name] for name in given if name not in _NOT_OF_TEXT}
    return plain, factor


def linear_attention_spec(
    config: Mapping[str, Any], architecture: str
) -> LinearAttentionSpec | None:
    """The spec of recurrent layers, or None if every layer is full attention.

    Raises CheckpointError for malformed fields, UnsupportedModelError for what is not implemented.
    """
    refuse_unimplemented(config, _IMPLEMENTED, architecture)
    layers = _linear_layers(config)
    if not layers:
        return None
    spec = LinearAttentionSpec(
        layers=layers,
        num_key_heads=size(config, "linear_num_key_heads", 16),
        num_value_heads=size(config, "linear_num_value_heads", 32),
        key_dim=size(config, "linear_key_head_dim", 128),
        value_dim=size(config, "linear_value_head_dim", 128),
        conv_width=size(config, "linear_conv_kernel_dim", 4),
        interleaved=architecture == "Qwen3NextForCausalLM",
    )
    if spec.num_value_heads % spec.num_key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads={spec.num_value_heads} is not a multiple of "
            f"linear_num_key_heads={spec.num_key_heads}"
        )
    return spec


def _linear_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers = size(config, "num_hidden_layers")
    interval = size(config, "full_attention_interval", _INTERVAL)
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(num_layers)
    ]
    check_layer_types(kinds, ("full_attention", "linear_attention"), num_layers)
    if "full_attention" not in kinds:
        raise UnsupportedModelError("config.json: no layer of layer_types is full_attention")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
