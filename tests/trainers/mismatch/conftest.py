"""Tiny models of four families, each with engines of two dtypes and their rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rollout import Rollout, RolloutEngine, SamplingParams
from tests.helpers.tiny_families import save_tiny_family
from tests.helpers.tiny_moe import save_tiny_moe

PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 9]
FAMILIES = ("llama", "qwen3 window", "gemma3", "qwen3 moe")


class Pair:
    """A folder, its engine, and rollouts of it."""

    def __init__(self, folder: Path, dtype: str, prompts: Any = PROMPTS) -> None:
        self.folder, self.dtype, self.prompts = folder, dtype, prompts

    @cached_property
    def engine(self) -> RolloutEngine:
        return RolloutEngine.from_pretrained(self.folder, spec="none", dtype=self.dtype)

    @cached_property
    def sampled(self) -> list[Rollout]:
        return self.rollouts()

    def rollouts(self, **params: Any) -> list[Rollout]:
        given = {"max_new_tokens": 30, "n": 2, "ignore_eos": True} | params
        return self.engine.generate(self.prompts, SamplingParams(**given))

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype).eval()


def opened(folder: Path, family: str, *dtypes: str) -> Iterator[dict[str, Pair]]:
    """The pairs of a family by dtype."""
    if family == "qwen3 moe":
        save_tiny_moe(folder)
    else:
        save_tiny_family(folder, family)
    found = {dtype: Pair(folder, dtype) for dtype in dtypes}
    yield found
    for pair in found.values():
        pair.engine.close()


@pytest.fixture(scope="package", params=FAMILIES)
def pairs(request, tmp_path_factory) -> Iterator[dict[str, Pair]]:
    """The pairs of each family."""
    folder = tmp_path_factory.mktemp("mismatch")
    yield from opened(folder, request.param, "float32", "bfloat16")


@pytest.fixture(scope="package")
def windowed(tmp_path_factory) -> Iterator[Pair]:
    """A Qwen3 of float32 with a window of 5."""
    for found in opened(tmp_path_factory.mktemp("windowed"), "qwen3 window", "float32"):
        yield found["float32"]


@pytest.fixture(scope="package")
def moe(tmp_path_factory) -> Iterator[Pair]:
    """A Qwen3-MoE of float32."""
    for found in opened(tmp_path_factory.mktemp("moe"), "qwen3 moe", "float32"):
        yield found["float32"]
