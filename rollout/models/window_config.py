"""Reads sliding windows from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import UnsupportedModelError


def refuse_sliding_window(
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
