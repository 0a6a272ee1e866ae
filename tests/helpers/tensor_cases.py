"""Requests and updates that tensor-parallel ranks and a single rank must answer alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rollout import SamplingParams
from rollout.models.checkpoint import Checkpoint

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


def numbers(rollouts) -> list:
    return [[r.prompt_ids, r.token_ids, r.logprobs] for r in rollouts]


def stored(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    return {name: tensor.clone() for name, tensor in Checkpoint(Path(folder))}


def changed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes."""
    return {name: tensor.flip(0).clone() for name, tensor in tensors.items()}
