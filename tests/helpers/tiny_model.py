"""Random models small enough for a test, written as real checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 97,
    hidden_size: int = 48,
    num_layers: int = 2,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    intermediate_size: int = 80,
    max_positions: int = 512,
    sharpness: float = 6.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
) -> Path:
    """A Llama checkpoint of random weights.

    ``sharpness`` scales the head: larger means fewer likely tokens, so that drafts are accepted.
    A ``tied`` model's head is its embedding, and ``sharpness`` is not looked at.
    """
    generator = torch.Generator().manual_seed(seed)
    head_dim = hidden_size // num_heads

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5
        return values.to(dtype)

    tensors = {
        "model.embed_tokens.weight": random(
            vocab_size, hidden_size, scale=1.0 if tied else hidden_size**0.5
        ),
        "model.norm.weight": torch.ones(hidden_size, dtype=dtype),
        "lm_head.weight": random(vocab_size, hidden_size, scale=sharpness),
    }
    if tied:
        del tensors["lm_head.weight"]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (num_heads * head_dim, hidden_size),
            "self_attn.k_proj": (num_kv_heads * head_dim, hidden_size),
            "self_attn.v_proj": (num_kv_heads * head_dim, hidden_size),
            "self_attn.o_proj": (hidden_size, num_heads * head_dim),
            "mlp.gate_proj": (intermediate_size, hidden_size),
            "mlp.up_proj": (intermediate_size, hidden_size),
            "mlp.down_proj": (hidden_size, intermediate_size),
        }
        for name, shape in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = random(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden_size, dtype=dtype)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return write_checkpoint(folder, config, tensors)


def write_checkpoint(
    folder: Path, config: Mapping[str, object], tensors: dict[str, torch.Tensor]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
