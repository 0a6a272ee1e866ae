"""Random models of families that differ from Llama in their attention, norms or scales."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
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
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**heads(6, 6)),
    "llama biases": LlamaConfig(
        **heads(6, 3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "llama wide heads": LlamaConfig(**heads(4, 1, head_dim=22)),
    "mistral": MistralConfig(**heads(8, 2, head_dim=10, sliding_window=None)),
    "qwen2": Qwen2Config(**heads(4, 2)),
    "qwen3": Qwen3Config(
        **heads(4, 1, head_dim=26, attention_bias=True, tie_word_embeddings=True)
    ),
    "phi3": Phi3Config(**heads(6, 2)),
    "phi3 long": Phi3Config(
        **heads(6, 3, rope_parameters=dict(LONG), original_max_position_embeddings=100)
    ),
    "olmo2": Olmo2Config(**heads(3, 3, attention_bias=True, tie_word_embeddings=True)),
    "granite": GraniteConfig(
        **heads(6, 2, embedding_multiplier=3.5, residual_multiplier=0.3,
                attention_multiplier=0.2, logits_scaling=0.35)
    ),
    "granite biases": GraniteConfig(
        **heads(4, 4, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
                embedding_multiplier=12.0, attention_multiplier=0.015)
    ),
    "granite 4": GraniteMoeHybridConfig(
        **heads(6, 2, embedding_multiplier=2.5, residual_multiplier=0.4, attention_multiplier=0.1,
                logits_scaling=0.5, num_local_experts=0, shared_intermediate_size=50,
                layer_types=["full_attention"] * 3, position_embedding_type="rope",
                mamba_n_heads=4)
    ),
    "smollm3": SmolLM3Config(
        **heads(4, 1, no_rope_layers=[0, 1, 0], attention_bias=True, tie_word_embeddings=True)
    ),
    "smollm3 window": SmolLM3Config(
        **heads(6, 2, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=6)
    ),
    "mistral window": MistralConfig(**heads(6, 2, sliding_window=11)),
    "ministral": MinistralConfig(
        **heads(6, 3, head_dim=8, sliding_window=6,
                layer_types=["sliding_attention", "full_attention", "full_attention"])
    ),
    "qwen2 window": Qwen2Config(
        **heads(4, 2, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    ),
    "qwen3 window": Qwen3Config(
        **heads(4, 1, head_dim=10, use_sliding_window=True, sliding_window=5,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    ),
    "qwen3 moe window": Qwen3MoeConfig(
        **heads(4, 2, head_dim=12, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2,
                use_sliding_window=True, sliding_window=9)
    ),
    "gpt-oss": GptOssConfig(
        **heads(6, 2, head_dim=10, intermediate_size=64, num_local_experts=5,
                num_experts_per_tok=2, sliding_window=9,
                swiglu_limit=0.8,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                rope_parameters={"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0,
                                 "original_max_position_embeddings": 128, "truncate": False})
    ),
    "gpt-oss plain": GptOssConfig(
        **heads(4, 4, head_dim=16, intermediate_size=76, num_local_experts=3, num_experts_per_tok=3,
                sliding_window=200,
                attention_bias=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    ),
    "phi3 window": Phi3Config(**heads(6, 2, sliding_window=9)),
    "olmo3": Olmo3Config(
        **heads(4, 2, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                sliding_window=8, rope_parameters=dict(TWO_ROPES))
    ),
    "gemma2": Gemma2Config(
        **heads(4, 2, head_dim=14, sliding_window=10, query_pre_attn_scalar=20,
                attn_logit_softcapping=1.5, final_logit_softcapping=4.0)
    ),
    "gemma3": Gemma3TextConfig(
        **heads(4, 1, head_dim=10, sliding_window=7, query_pre_attn_scalar=12,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                rope_parameters=dict(TWO_ROPES))
    ),
    "gemma3 capped": Gemma3TextConfig(
        **heads(6, 2, head_dim=16, sliding_window=13, final_logit_softcapping=3.0,
                tie_word_embeddings=True)
    ),
}  # fmt: skip
PARITY = [
    ("mistral window", "bfloat16"),
    ("olmo3", "float32"),
    ("gemma2", "float32"),
    ("gpt-oss", "float32"),
]
"""Configs, and their dtypes, that between them have all that differs."""


def tiny_family(name: str, *, sharpness: float = 6.0, seed: int = 0) -> PreTrainedModel:
    """transformers' model of a config of CONFIGS. ``sharpness`` scales the head if it is its own:
    larger means fewer likely tokens, so drafts are accepted."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in weight_name:
                parameter.copy_(0.2 * values + (0 if "gemma" in name else 1))
            elif weight_name.endswith("sinks"):
                parameter.copy_(values + 1)
            elif weight_name.endswith("bias"):
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
