"""Hybrids whose weights do not matter, as folders an engine starts from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from replay_bench.shapes import Shape, write_config

SMALL = Shape(
    hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128,
    vocab_size=49_152, tied=True,
)  # fmt: skip

REFERENCE = Shape(
    hidden_size=512, num_layers=12, num_heads=4, num_kv_heads=2, head_dim=128, ffn_size=1536,
    vocab_size=49_152, tied=True,
)  # fmt: skip


def write_hybrid_config(folder: Path, shape: Shape) -> Path:
    """Qwen3.5's, three of four layers recurrent, with as many value heads as two hidden sizes hold.

    A config.json and nothing else: for ``load_format="dummy"``.
    """
    dim = min(128, shape.hidden_size // 4)
    value_heads = 2 * shape.hidden_size // dim
    path = write_config(folder, shape) / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_num_key_heads": value_heads // 2,
        "linear_num_value_heads": value_heads,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    }
    path.write_text(json.dumps(config))
    return folder


def with_vocabulary(shape: Shape, vocab_size: int) -> Shape:
    return replace(shape, vocab_size=max(shape.vocab_size, vocab_size))
