"""How long rollouts get: drawn from what was recorded, or from a distribution fitted to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GroupSampler = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""Lengths of the n samples of one random prompt, in tokens."""

# Log-normal: log L = mean + between * prompt + within * sample, both normal. Fitted by moments to
# the 640 rollouts of 20 prompts of a trace with a long tail (mean 939, median 641, largest 4,232).
LOG_MEAN, BETWEEN_PROMPTS, WITHIN_PROMPT = 6.50, 0.77, 0.35
MAX_NEW_TOKENS = 8192
"""Where the fitted ones are cut."""


def fitted(rng: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    log_lengths = (
        LOG_MEAN
        + BETWEEN_PROMPTS * rng.standard_normal()
        + WITHIN_PROMPT * rng.standard_normal(num_samples)
    )
    return np.clip(np.exp(log_lengths), 1, MAX_NEW_TOKENS).astype(np.int64)


def recorded(path: Path) -> GroupSampler:
    """From a trace (.npz) or a job's rollouts (.jsonl): a prompt at random, its samples at random.

    Of a file that holds each prompt once or twice, samples of one prompt come out too much alike.
    """
    groups = _npz_groups(path) if path.suffix == ".npz" else _jsonl_groups(path)
    if not groups:
        raise SystemExit(f"{path}: holds no rollouts")

    def sample(rng: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
        return rng.choice(groups[rng.integers(len(groups))], num_samples)

    return sample


def _npz_groups(path: Path) -> list[NDArray[np.int64]]:
    with np.load(path) as arrays:
        lengths, prompts = np.diff(arrays["resp_off"]), arrays["resp_prompt"]
    return [lengths[prompts == prompt] for prompt in np.unique(prompts)]


def _jsonl_groups(path: Path) -> list[NDArray[np.int64]]:
    by_prompt: dict[int, list[int]] = {}
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            by_prompt.setdefault(row["prompt_index"], []).append(len(row["token_ids"]))
    return [np.array(each, dtype=np.int64) for each in by_prompt.values()]
