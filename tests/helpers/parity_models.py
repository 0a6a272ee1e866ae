"""Tiny models of every kind, their drafts, and what plain decoding gives: made once per process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from rollout import Rollout, RolloutEngine, SamplingParams
from tests.helpers.tiny_deepseek import save_tiny_deepseek
from tests.helpers.tiny_draft import (
    save_copying_eagle1,
    save_tiny_dflash,
    save_tiny_eagle1,
    save_tiny_eagle3,
)
from tests.helpers.tiny_hybrid import save_tiny_chain
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.tiny_mtp import add_chain, chain_tensors, save_tiny_mtp

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=18),
    "sampled": SamplingParams(temperature=0.8, max_new_tokens=24, n=2, seed=5),
    "shaped": SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1,
        min_new_tokens=8, max_new_tokens=18, seed=6,
        raw_logprobs=True, sampling_logprobs=True, top_logprobs=2, entropy=True,
        sampling_mask=True, logprob_token_ids=[7, 3, 90],
    ),
    "cut": SamplingParams(
        temperature=0.9, top_k=30, min_p=0.01, presence_penalty=0.4, logit_bias={5: 2.0, 9: -3.0},
        stop_token_ids=[11, 12], max_new_tokens=18, seed=8,
        allowed_token_ids=[*range(2, 30), *range(33, 96)],
    ),
}  # fmt: skip
FIXED = {"budget": "fixed", "min_probability": 0.0}
LEARNED = {"budget": "learned", "calibration_seconds": 0}
RECURRENT = ("recurrent", "recurrent experts")
SPARSE = ("experts", "recurrent experts", "latent")
WINDOW = 20


def prompts() -> list[list[int]]:
    """Prompts of lengths about 64, where a block of keys begins, some with a prefix in common."""
    random = np.random.default_rng(3)
    shared = random.integers(3, 97, 62).tolist()
    own = [random.integers(3, 97, length).tolist() for length in (1, 5)]
    return [own[0], shared, [*shared, 7], [*shared[:40], *own[1]]]


def _recurrent(folder: Path, family: str, *, experts: bool) -> Path:
    save_tiny_chain(folder, family, experts=experts)
    return folder


def _shallow(folder: Path) -> Path:
    """One layer, which `save_copying_eagle1` can copy, and a chain."""
    return save_tiny_mtp(folder, "mimo", 3, likely=True, num_layers=1)


def _windows(folder: Path) -> Path:
    """One of two layers has a window; tied; with a chain."""
    folder = save_tiny_mtp(folder, "mimo", 2, tied=True)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _experts(folder: Path) -> Path:
    """With a chain of dense layers."""
    tensors = chain_tensors("mimo", 2, heads=(4, 2, 16))
    for step in range(2):
        for norm in ("q_norm", "k_norm"):
            tensors[f"model.mtp_layers.{step}.self_attn.{norm}.weight"] = torch.ones(16)
    return add_chain(save_tiny_moe(folder), tensors, 2)


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: save_tiny_mtp(folder, "mimo", 3, likely=True),
    "shallow": _shallow,
    "windows": _windows,
    "recurrent": lambda folder: _recurrent(folder, "qwen3_5", experts=False),
    "experts": _experts,
    "recurrent experts": lambda folder: _recurrent(folder, "qwen3_next", experts=True),
    "latent": lambda folder: save_tiny_deepseek(folder, "deepseek_v3"),
}


class ParityModels:
    """Targets, drafts and references, made once in folders below one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.target = cache(self._target)
        self.draft = cache(self._draft)
        self.reference = cache(self._reference)
        self._plain_engine = cache(self._open_plain)

    def _target(self, model: str) -> Path:
        return MODELS[model](self._folder / model)

    def _draft(self, model: str, kind: str) -> Path | None:
        """``kind``: eagle, eagle3, dflash or mtp. None: the target's own checkpoint has it."""
        target, folder = self.target(model), self._folder / f"{model} {kind}"
        if kind == "eagle":
            save = save_copying_eagle1 if model == "shallow" else save_tiny_eagle1
            return save(folder, target)
        if kind == "dflash":
            return save_tiny_dflash(folder, target, layers=(0, 1))
        if kind == "eagle3":
            layers = (0, 1) if model == "shallow" else (0, 1, 2)
            return save_tiny_eagle3(
                folder, target, layers=layers, draft_vocab_size=64, unsorted=True
            )
        return None

    def _reference(self, model: str, dtype: str, params: str) -> list[Rollout]:
        """Plain decoding, one request at a time, no prefix cache: what every row must equal."""
        engine = self._plain_engine(model, dtype)
        asked = replace(PARAMS[params], routed_experts=model in SPARSE)
        rollouts = engine.generate(prompts(), asked)
        engine.check_integrity()
        return rollouts

    def _open_plain(self, model: str, dtype: str) -> RolloutEngine:
        return RolloutEngine.from_pretrained(
            self.target(model), "none", dtype=dtype, max_running=1, prefix_cache=False,
            record_routes=model in SPARSE, window_slots=0,
        )  # fmt: skip
