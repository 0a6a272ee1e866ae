"""Random models of the families whose weights a trainer holds in other ways than Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.helpers.tiny_deepseek import save_tiny_deepseek
from tests.helpers.tiny_families import save_tiny_family

# torch multiplies experts in bfloat16 by rows of multiples of 16 bytes alone.
_save_sparse = partial(save_tiny_deepseek, hidden_size=48, moe_intermediate_size=24)

FAMILIES: Mapping[str, Callable[..., Path]] = {
    "latent": partial(_save_sparse, family="deepseek_v3"),
    "glm-moe": partial(_save_sparse, family="glm4_moe"),
    "gpt-oss": partial(save_tiny_family, name="gpt-oss"),
    "gemma": partial(save_tiny_family, name="gemma2"),
}

LORA_TARGETS: Mapping[str, list[str]] = {
    "latent": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "glm-moe": ["q_proj", "v_proj", "o_proj"],
    "gpt-oss": ["q_proj", "o_proj"],
    "gemma": ["k_proj", "up_proj"],
}
"""Products of each family that adapters are trained for."""


def save_tiny_trainers(folder: Path) -> dict[str, Path]:
    """Checkpoints of all of them, by name."""
    return {name: save(folder / name, sharpness=1.0) for name, save in FAMILIES.items()}
