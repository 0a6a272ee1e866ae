"""Random models of families that differ from Llama in their attention, norms or scales."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    SmolLM3Config,
)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def heads(heads: int, kv_heads: int, **others: object) -> dict[str, object]:
    return SMALL | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | others


LONG = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.5, 7.0],
    "original_max_position_embeddings": 100,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "phi3": Phi3Config(**heads(6, 2)),
    "phi3 long": Phi3Config(
        **heads(6, 3, rope_parameters=dict(LONG), original_max_position_embeddings=100)
    ),
    "olmo2": Olmo2Config(**heads(4, 2)),
    "olmo2 biases": Olmo2Config(**heads(3, 3, attention_bias=True, tie_word_embeddings=True)),
    "granite": GraniteConfig(
        **heads(6, 2, embedding_multiplier=3.5, residual_multiplier=0.3,
                attention_multiplier=0.2, logits_scaling=0.35)
    ),
    "granite biases": GraniteConfig(
        **heads(4, 4, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
                embedding_multiplier=12.0, attention_multiplier=0.015)
    ),
    "smollm3": SmolLM3Config(**heads(6, 2, no_rope_layer_interval=2)),
    "smollm3 biases": SmolLM3Config(
        **heads(4, 1, no_rope_layers=[0, 1, 0], attention_bias=True, tie_word_embeddings=True)
    ),
}  # fmt: skip


def tiny_family(name: str, *, sharpness: float = 6.0, seed: int = 0) -> PreTrainedModel:
    """transformers' model of a config of CONFIGS. ``sharpness`` scales the head if it is its own:
    larger means fewer likely tokens, so drafts are accepted."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in weight_name:
                parameter.copy_(1 + 0.2 * values)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * values)
            elif weight_name == "lm_head.weight":
                parameter.copy_(values * sharpness / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
    return model


def save_tiny_family(folder: Path, name: str, **options: object) -> Path:
    """Write `tiny_family` as transformers does; ``options`` are its."""
    tiny_family(name, **options).save_pretrained(folder)
    return folder
