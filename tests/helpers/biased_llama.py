"""A random Llama with a bias wherever one can be, and more query heads than kv heads."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.tiny_hybrid import randomise


def save_biased_llama(folder: Path, tied: bool = False) -> Path:
    """Eight query heads on two kv heads, and a bias wherever a Llama can have one."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=64, intermediate_size=90, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=2, attention_bias=True, mlp_bias=True,
            max_position_embeddings=64, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    randomise(model)
    model.save_pretrained(folder)
    return folder
