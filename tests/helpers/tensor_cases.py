"""Requests and updates that tensor-parallel ranks and a single rank must answer alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rollout import SamplingParams
from rollout.models.checkpoint import Checkpoint
from tests.helpers.tiny_deepseek import save_tiny_deepseek
from tests.helpers.tiny_families import save_tiny_family

PARAMS = SamplingParams(max_new_tokens=9, temperature=0.8, top_p=0.95, seed=3)
SAMPLED = replace(PARAMS, n=2, max_new_tokens=16)


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 97, 24).tolist()
    return [rng.integers(3, 97, length).tolist() for length in (1, 21)] + [
        shared,
        [*shared, 7],
    ]


PROMPTS = _prompts()

FAMILIES: Mapping[str, Callable[..., Path]] = {
    "olmo": partial(save_tiny_family, name="olmo3"),
    "gemma 2": partial(save_tiny_family, name="gemma2"),
    "gemma 3": partial(save_tiny_family, name="gemma3"),
    "gpt-oss": partial(save_tiny_family, name="gpt-oss"),
    "phi": partial(save_tiny_family, name="phi3"),
    "granite": partial(save_tiny_family, name="granite"),
    "smollm3": partial(save_tiny_family, name="smollm3 window"),
    "mistral": partial(save_tiny_family, name="mistral window"),
    "glm": partial(save_tiny_deepseek, family="glm4_moe"),
    "deepseek v2": partial(save_tiny_deepseek, family="deepseek_v2"),
    "deepseek v3": partial(save_tiny_deepseek, family="deepseek_v3"),
    "glm lite": partial(save_tiny_deepseek, family="glm4_moe_lite"),
}
"""Families beside Llama and the hybrids, and what writes a random model of each."""


def numbers(rollouts) -> list:
    return [[r.prompt_ids, r.token_ids, r.logprobs] for r in rollouts]


def stored(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    return {name: tensor.clone() for name, tensor in Checkpoint(Path(folder))}


def changed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes."""
    return {name: tensor.flip(0).clone() for name, tensor in tensors.items()}
