"""The parity chain on a real model, in the dtype the engine picks for it, and in float32."""

from __future__ import annotations

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.overrides import engine_config
from tests.helpers.oracle_worker import oracle_factory

PROMPTS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Repeat after me: one two three, one two three, one two three."}],
    "Once upon a time there was a fox who",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=28),
    "sampled": SamplingParams(temperature=1.0, max_new_tokens=28, n=2, seed=9),
}


def numbers(rollouts):
    return [(r.token_ids, r.logprobs, r.text) for r in rollouts]


@pytest.fixture(scope="module", params=["auto", "float32"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def plain(demo_model_path, dtype):
    engine = RolloutEngine.from_pretrained(
        demo_model_path, spec="none", dtype=dtype, max_running=1, prefix_cache=False
    )
    return {name: engine.generate(PROMPTS, params) for name, params in PARAMS.items()}


def test_the_model_answers(plain):
    assert "Paris" in plain["greedy"][0].text


@pytest.mark.parametrize(
    "options",
    [
        {"spec": "none", "max_running": 3, "chunk_len": 5},
        {
            "spec": "ngram",
            "max_running": 8,
            "spec_options": {"min_probability": 0.0, "budget": "fixed"},
        },
    ],
    ids=["company and chunks", "ngram"],
)
def test_nothing_can_be_seen(demo_model_path, dtype, plain, options):
    engine = RolloutEngine.from_pretrained(demo_model_path, dtype=dtype, **options)
    for name, params in PARAMS.items():
        assert numbers(engine.generate(PROMPTS, params)) == numbers(plain[name])
        again = engine.generate(PROMPTS, params)
        assert numbers(again) == numbers(plain[name])
        if options["spec"] == "ngram":
            assert sum(r.stats.accepted for r in again) > 0
        for rollout in again:
            assert engine.score(rollout.prompt_ids, rollout.token_ids, params) == rollout.logprobs
    engine.check_integrity()


@pytest.mark.parametrize("threads", [1, 2])
def test_branching_trees_and_threads_cannot_be_seen(demo_model_path, dtype, plain, threads):
    before = torch.get_num_threads()
    try:
        for name, params in PARAMS.items():
            recorded = {
                (r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in plain[name]
            }
            config = engine_config(demo_model_path, {"dtype": dtype, "num_threads": threads})
            factory = oracle_factory(recorded, size=16, right=0.7, chain=False)
            engine = RolloutEngine.from_config(config, factory)
            assert numbers(engine.generate(PROMPTS, params)) == numbers(plain[name])
    finally:
        torch.set_num_threads(before)
