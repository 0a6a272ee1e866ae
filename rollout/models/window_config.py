"""Reads sliding windows from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import UnsupportedModelError
from rollout.models.config_fields import check_layer_types, size

_LATER_LAYERS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM")
# Architectures that have a window only with ``use_sliding_window``.
_ASKED_FOR = (*_LATER_LAYERS, "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM")
# Architectures whose window is 4096 where the config has none.
_BY_DEFAULT = (*_LATER_LAYERS, "Qwen3MoeForCausalLM", "MistralForCausalLM")
_WINDOWED = (
    *_ASKED_FOR, "MistralForCausalLM", "MinistralForCausalLM", "Phi3ForCausalLM",
    "Olmo3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM",
)  # fmt: skip


def sliding_window(
    config: Mapping[str, Any], architecture: object, num_layers: int, max_context_len: int
) -> tuple[tuple[int, ...], int | None]:
    """The layers with a window, and the keys that it holds; None if it hides nothing.

    Raises UnsupportedModelError for other kinds of layers, and for a window of an architecture that
    has none; CheckpointError for malformed fields.
    """
    kinds = config.get("layer_types")
    if kinds is not None:
        check_layer_types(kinds, ("full_attention", "sliding_attention"), num_layers)
    if architecture in _ASKED_FOR and not config.get("use_sliding_window", False):
        return (), None
    layers = tuple(range(num_layers))
    if kinds is not None:
        layers = tuple(layer for layer in layers if kinds[layer] == "sliding_attention")
    elif architecture in _LATER_LAYERS:
        layers = layers[config.get("max_window_layers", 28) :]
    given = config.get("sliding_window", 4096 if architecture in _BY_DEFAULT else None)
    if given is None or not layers:
        return layers if kinds is not None else (), None
    window = size(config, "sliding_window", 4096)
    if window >= max_context_len:
        return layers, None
    if architecture not in _WINDOWED:
        raise UnsupportedModelError(
            f"config.json: sliding_window={window} is not implemented for {architecture}; with "
            f"model.max_context_len <= {window} it hides nothing and the model can be used"
        )
    return layers, window
