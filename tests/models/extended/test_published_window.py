"""Gemma 3 270M: a published checkpoint whose layers, but for every sixth, see 512 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutEngine, SamplingParams

ROOT = Path(__file__).parents[3]
GEMMA = ROOT / "models" / "gemma-3-270m"


@torch.inference_mode()
def test_greedy_tokens_beyond_the_window_are_those_of_transformers():
    if not (GEMMA / "config.json").exists():
        pytest.skip("Gemma 3 270M is not there: make gemma")
    engine = RolloutEngine.from_pretrained(
        GEMMA, spec="ngram", spec_options={"budget": "fixed"}, dtype="float32", kv_bytes=1 << 28
    )
    text = (ROOT / "LICENSE").read_text()[:3500]
    (rollout,) = engine.generate([text], SamplingParams(temperature=0, max_new_tokens=40))
    engine.close()
    assert len(rollout.prompt_ids) > 600
    assert rollout.stats.accepted > 0

    tokens = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids[:-1]]])
    theirs = AutoModelForCausalLM.from_pretrained(GEMMA, dtype=torch.float32)
    logits_TV = theirs(tokens, logits_to_keep=len(rollout.token_ids)).logits[0]
    logprobs_T, token_ids_T = logits_TV.log_softmax(dim=-1).max(dim=-1)
    assert rollout.token_ids == token_ids_T.tolist()
    assert rollout.logprobs == pytest.approx(logprobs_T.tolist(), abs=1e-3)
