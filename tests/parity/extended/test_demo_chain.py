"""The parity chain on a real model, in the dtype the engine picks for it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from spec_workers.budget import FixedBudget
from spec_workers.corpus.ngram_corpus import NgramCorpus
from spec_workers.corpus.options import CorpusOptions
from spec_workers.ngram import NgramWorker
from spec_workers.none import PlainWorker
from spec_workers.target import TargetWorker
from tests.helpers.oracle_worker import OracleWorker
from tests.helpers.transformers_answers import assert_logprobs

PROMPTS = [
    "The capital of France is",
    "Repeat after me: one two three, one two three, one two three.",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=10),
    "sampled": SamplingParams(temperature=1.0, max_new_tokens=10, n=2, seed=9),
}


@pytest.fixture(scope="module")
def config(demo_model_path):
    return engine_config(demo_model_path, {"max_running": 3, "chunk_len": 5})


@pytest.fixture(scope="module")
def target(config):
    return TargetWorker(config)


def engine_of(config, worker) -> RolloutEngine:
    worker.memory.reset()
    return RolloutEngine(config, worker)


@pytest.fixture(scope="module")
def plain(config, target):
    """Plain decoding, one request at a time, nothing cached."""
    engine = engine_of(config, PlainWorker(target))
    found = {}
    for name, params in PARAMS.items():
        for prompt_index, prompt in enumerate(PROMPTS):
            for sample_index in range(params.n):
                engine.flush_cache()
                engine.submit(prompt, params, prompt_index=prompt_index, sample_index=sample_index)
                while engine.has_unfinished:
                    for rollout in engine.step():
                        found[name, prompt_index, sample_index] = rollout
    return found


def check(engine, plain, name):
    rollouts = engine.generate(PROMPTS, PARAMS[name])
    for r in rollouts:
        wanted = plain[name, r.prompt_index, r.sample_index]
        assert (r.token_ids, r.logprobs, r.text) == (wanted.token_ids, wanted.logprobs, wanted.text)
    engine.check_integrity()
    return rollouts


def test_the_model_answers_as_transformers_does(plain, demo_model_path):
    assert "Paris" in plain["greedy", 0, 0].text
    theirs = AutoModelForCausalLM.from_pretrained(demo_model_path, dtype=torch.float32)
    engine = RolloutEngine.from_pretrained(demo_model_path, "none", dtype="float32")
    assert_logprobs(engine.generate(PROMPTS, PARAMS["sampled"]), theirs)


def test_company_and_chunks_cannot_be_seen(config, target, plain):
    engine = engine_of(config, PlainWorker(target))
    for name, params in PARAMS.items():
        for r in check(engine, plain, name)[:2]:
            assert engine.score(r.prompt_ids, r.token_ids, params) == r.logprobs


def test_ngram_cannot_be_seen(config, target, plain):
    worker = NgramWorker(
        target,
        NgramCorpus(target.vocab_size, CorpusOptions(corpus_bytes=1 << 20)),
        num_draft_tokens=8,
        calibration_seconds=0,
        budget=FixedBudget(0.0),
    )
    engine = engine_of(config, worker)
    check(engine, plain, "sampled")
    assert sum(r.stats.accepted for r in check(engine, plain, "sampled")) > 0


def test_branching_trees_and_threads_cannot_be_seen(config, target, plain):
    recorded = {
        (prompt_index, sample_index): r.prompt_ids + r.token_ids
        for (name, prompt_index, sample_index), r in plain.items()
        if name == "sampled"
    }
    worker = OracleWorker(target, recorded, size=16, right=0.7, chain=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check(engine_of(config, worker), plain, "sampled")
    finally:
        torch.set_num_threads(before)
