"""The engines that are compared, and how they are brought where training would have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_corpus import forget
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.types import Prompt

PLAIN = "none"
BUDGET = "budget"

_KV_BYTES = 512 << 20  # several engines share the memory


def fixed_options(num_draft_tokens: int) -> dict[str, Any]:
    """`spec_options` of an engine that verifies so many nodes per request, whatever they cost."""
    return {"num_draft_tokens": num_draft_tokens, "budget": "fixed"}


def make_engine(
    model: Path, max_running: int, spec_options: dict[str, Any] | None
) -> RolloutEngine:
    """In bf16; ``spec_options`` None decodes plainly, {} has the budget as it comes."""
    return RolloutEngine.from_pretrained(
        str(model),
        spec="none" if spec_options is None else "ngram",
        spec_options=spec_options,
        dtype="bfloat16",
        max_running=max_running,
        kv_bytes=_KV_BYTES,
    )


def warm_up(engine: RolloutEngine, prompts: Sequence[Prompt]) -> None:
    """The first forwards of a shape are slow. What the corpus saw is forgotten again."""
    engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=24, seed=77))
    forget(engine)


def next_policy(engine: RolloutEngine, weights: dict[str, torch.Tensor], version: int) -> None:
    """A step of training that changed nothing: drafts are from an older policy from now on."""
    engine.update_weights_from_tensor(list(weights.items()), weight_version=version)


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """By their checkpoint names."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= load_file(file)
    return weights
