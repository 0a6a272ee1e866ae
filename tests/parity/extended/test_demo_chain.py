"""The parity chain on a real model, in the dtype the engine picks for it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutEngine, SamplingParams
from tests.helpers.compared import numbers
from tests.helpers.parity_models import FIXED
from tests.helpers.transformers_answers import assert_logprobs

PROMPTS = [
    "The capital of France is",
    "Repeat after me: one two three, one two three, one two three.",
]
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=10, n=2, seed=9)


@pytest.fixture(scope="module")
def plain(demo_model_path):
    """Plain decoding, one request at a time, nothing cached."""
    engine = RolloutEngine.from_pretrained(
        demo_model_path, "none", max_running=1, prefix_cache=False
    )
    (greedy,) = engine.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_new_tokens=10))
    assert "Paris" in greedy.text
    return numbers(engine.generate(PROMPTS, PARAMS))


def test_logprobs_are_those_of_transformers(demo_model_path):
    theirs = AutoModelForCausalLM.from_pretrained(demo_model_path, dtype=torch.float32)
    engine = RolloutEngine.from_pretrained(demo_model_path, "none", dtype="float32")
    assert_logprobs(engine.generate(PROMPTS, PARAMS), theirs)


def test_company_chunks_and_drafts_cannot_be_seen(demo_model_path, plain):
    engine = RolloutEngine.from_pretrained(
        demo_model_path, "ngram", max_running=3, chunk_len=5, spec_options=FIXED
    )
    for _ in range(2):  # the second time the corpus knows every answer
        rollouts = engine.generate(PROMPTS, PARAMS)
        assert numbers(rollouts) == plain
        engine.check_integrity()
    assert sum(r.stats.accepted for r in rollouts) > 0
    for r in rollouts[:2]:
        assert engine.score(r.prompt_ids, r.token_ids, PARAMS) == r.logprobs
