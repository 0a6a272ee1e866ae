"""Tiny models of four families, each with engines of two dtypes and their rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rollout import Rollout, RolloutEngine, SamplingParams
from tests.helpers.tiny_families import save_tiny_family
from tests.helpers.tiny_moe import save_tiny_moe

PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 9]


@dataclass
class Pair:
    """A folder, its engine, and rollouts of it."""

    folder: Path
    dtype: str
    made: list[RolloutEngine] = field(default_factory=list)

    @cached_property
    def engine(self) -> RolloutEngine:
        self.made.append(RolloutEngine.from_pretrained(self.folder, spec="none", dtype=self.dtype))
        return self.made[0]

    def rollouts(self, **params: Any) -> list[Rollout]:
        given = {"max_new_tokens": 30, "n": 2, "ignore_eos": True} | params
        return self.engine.generate(PROMPTS, SamplingParams(**given))

    @cached_property
    def sampled(self) -> list[Rollout]:
        return self.rollouts()

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype).eval()


FAMILIES = ("llama", "qwen3 window", "gemma3", "qwen3 moe")


def _opened(folder: Path, family: str) -> Iterator[dict[str, Pair]]:
    if family == "qwen3 moe":
        save_tiny_moe(folder)
    else:
        save_tiny_family(folder, family)
    found = {dtype: Pair(folder, dtype) for dtype in ("float32", "bfloat16")}
    yield found
    for pair in found.values():
        for engine in pair.made:
            engine.close()


@pytest.fixture(scope="package", params=FAMILIES)
def pairs(request, tmp_path_factory) -> Iterator[dict[str, Pair]]:
    """The pairs of a family by dtype."""
    yield from _opened(tmp_path_factory.mktemp("mismatch"), request.param)


@pytest.fixture(scope="package")
def windowed(tmp_path_factory) -> Iterator[Pair]:
    """A Qwen3 of float32 with a window of 5."""
    for found in _opened(tmp_path_factory.mktemp("windowed"), "qwen3 window"):
        yield found["float32"]


@pytest.fixture(scope="package")
def moe(tmp_path_factory) -> Iterator[Pair]:
    """A Qwen3-MoE of float32."""
    for found in _opened(tmp_path_factory.mktemp("moe"), "qwen3 moe"):
        yield found["float32"]
