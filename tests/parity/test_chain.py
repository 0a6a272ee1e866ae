"""The parity chain, bit for bit on tokens and logprobs.

A batch of m is a batch of n; chunked prefill is prefill; decode is prefill; verify is decode;
speculation on is off; and `score` gives what generation gave. Each run is compared with plain
decoding, one request at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.overrides import engine_config
from tests.helpers.oracle_worker import oracle_factory

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=40, n=1),
    "sampled": SamplingParams(temperature=0.8, max_new_tokens=40, n=3, seed=5),
    "shaped": SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1,
        min_new_tokens=8, max_new_tokens=40, n=2, seed=6,
        raw_logprobs=True, sampling_logprobs=True, top_logprobs=2, entropy=True,
    ),
    "cut": SamplingParams(
        temperature=0.9, top_k=30, min_p=0.01, presence_penalty=0.4, logit_bias={5: 2.0, 9: -3.0},
        stop_token_ids=[11, 12], max_new_tokens=40, n=2, seed=8,
    ),
}  # fmt: skip


def prompts(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(3, vocab, 70).tolist()
    own = [rng.integers(3, vocab, int(length)).tolist() for length in (1, 5, 63, 64, 65, 130)]
    return [*own, shared, [*shared, 7], [*shared[:40], *own[1]]]


def numbers(rollouts):
    return [
        (r.prompt_index, r.sample_index, r.token_ids, r.logprobs, r.finish_reason, r.extras)
        for r in rollouts
    ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def plain(tiny_model_path, dtype):
    """Plain decoding, one request at a time, no prefix cache: what every other run must equal."""
    engine = RolloutEngine.from_pretrained(
        tiny_model_path, spec="none", dtype=dtype, max_running=1, prefix_cache=False
    )
    everything = {name: engine.generate(prompts(97), params) for name, params in PARAMS.items()}
    engine.check_integrity()
    return everything


def recorded(rollouts):
    return {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in rollouts}


def compare(engine, plain, name):
    rollouts = engine.generate(prompts(97), PARAMS[name])
    assert numbers(rollouts) == numbers(plain[name])
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0
    return rollouts


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    "options",
    [
        {"max_running": 3},
        {"max_running": 8},
        {"max_running": 8, "prefix_cache": False},
        {"max_running": 8, "chunk_len": 3},
        {"max_running": 8, "chunk_len": 17, "max_step_tokens": 24},
        {"max_running": 8, "max_kv_tokens": 260},
        {"max_running": 8, "num_threads": 1},
        {"max_running": 8, "num_threads": 2},
    ],
    ids=str,
)
def test_company_chunks_cache_preemption_and_threads_cannot_be_seen(
    tiny_model_path, dtype, plain, name, options
):
    threads = torch.get_num_threads()
    try:
        engine = RolloutEngine.from_pretrained(tiny_model_path, spec="none", dtype=dtype, **options)
        rollouts = compare(engine, plain, name)
    finally:
        torch.set_num_threads(threads)
    if "max_kv_tokens" in options and name != "greedy":
        assert sum(r.stats.preemptions for r in rollouts) > 0, "the test must force preemption"


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("scarce", [False, True], ids=["ample", "scarce"])
def test_no_draft_can_be_seen(tiny_model_path, dtype, plain, name, chain, right, scarce):
    factory = oracle_factory(recorded(plain[name]), size=20, right=right, chain=chain)
    options = {"max_kv_tokens": 260, "chunk_len": 9} if scarce else {}
    config = engine_config(tiny_model_path, {"dtype": dtype, "max_running": 5} | options)
    engine = RolloutEngine.from_config(config, factory)
    rollouts = compare(engine, plain, name)
    accepted = sum(r.stats.accepted for r in rollouts)
    drafted = sum(r.stats.drafted for r in rollouts)
    assert accepted > 0 if right else accepted < 0.1 * drafted


@pytest.mark.parametrize("name", PARAMS)
def test_ngram_cannot_be_seen(tiny_model_path, dtype, plain, name):
    engine = RolloutEngine.from_pretrained(
        tiny_model_path,
        dtype=dtype,
        max_running=4,
        spec_options={"num_draft_tokens": 12, "min_probability": 0.0, "budget": "fixed"},
    )
    compare(engine, plain, name)
    second = compare(engine, plain, name)  # the corpus knows every answer by now
    assert sum(r.stats.accepted for r in second) > len(second)


@pytest.mark.parametrize("name", PARAMS)
def test_score_is_what_generation_reported(tiny_model_path, dtype, plain, name):
    engine = RolloutEngine.from_pretrained(
        tiny_model_path, spec="none", dtype=dtype, chunk_len=19, max_running=2
    )
    for rollout in plain[name]:
        scored = engine.score(rollout.prompt_ids, rollout.token_ids, PARAMS[name])
        assert scored == rollout.logprobs
    engine.check_integrity()


@pytest.mark.parametrize("name", PARAMS)
def test_a_rollout_cut_anywhere_goes_on_as_if_it_had_not_been(tiny_model_path, dtype, plain, name):
    engine = RolloutEngine.from_pretrained(tiny_model_path, dtype=dtype, max_running=4)
    wanted = {}
    for rollout in plain[name][::3]:
        last = len(rollout.token_ids) - 1
        for cut in {0, min(1, last), last // 2, last}:
            request = engine.submit(
                rollout.prompt_ids,
                PARAMS[name],
                request_seed=rollout.seed,
                partial_ids=rollout.token_ids[:cut],
            )
            wanted[request.request_id] = (rollout.token_ids[cut:], rollout.logprobs[cut:])
    while engine.has_unfinished:
        for rollout in engine.step():
            assert (rollout.token_ids, rollout.logprobs) == wanted.pop(rollout.request_id)
    assert not wanted
