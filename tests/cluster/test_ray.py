"""Replicas as Ray actors."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.cluster.opening import open_with
from rollout.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.specs import worker_factory

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("own_ray")]

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=40, seed=5, n=4)
PROMPTS = [[3 + i % 7, 10 + i, 11] for i in range(10)]


def test_two_actors_give_the_tokens_of_one_engine(tiny_model_path):
    config = EngineConfig(
        model=ModelConfig(path=str(tiny_model_path)),
        memory=MemoryConfig(max_kv_tokens=2048),
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=64),
        num_threads=1,
    )
    factory = worker_factory("ngram", corpus_bytes=1 << 20)
    settings = ClusterConfig(kind=ClusterKind.ray, replicas=2, num_cpus=1)
    cluster = open_with(config, factory, settings)
    try:
        for index, prompt in enumerate(PROMPTS):
            for sample in range(PARAMS.n):
                cluster.submit(prompt, PARAMS, prompt_index=index, sample_index=sample)
        found = {}
        while cluster.has_unfinished:
            for each in cluster.step():
                found[each.prompt_index, each.sample_index] = (each.token_ids, each.logprobs)
    finally:
        cluster.close()
    expected = RolloutEngine.from_config(config, factory).generate(PROMPTS, PARAMS)
    assert found == {
        (each.prompt_index, each.sample_index): (each.token_ids, each.logprobs) for each in expected
    }
