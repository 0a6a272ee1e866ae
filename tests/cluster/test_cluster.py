"""A cluster of replicas on threads: the tokens of one engine, whoever dies."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.specs import worker_factory
from tests.cluster.thread_pool import ThreadPool

pytestmark = pytest.mark.timeout(120)

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=40, seed=5, n=4, entropy=True)
PROMPTS = [[3 + i % 7, 10 + i, 11] for i in range(10)]


@pytest.fixture
def config(tiny_model_path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(tiny_model_path)),
        memory=MemoryConfig(max_kv_tokens=2048),
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=64),
        num_threads=1,
    )


def factory():
    return worker_factory("ngram", corpus_bytes=1 << 20)


def cluster_of(config, replicas: int, **options) -> tuple[RolloutCluster, ThreadPool]:
    pool = ThreadPool(config, factory(), [f"replica-{i}" for i in range(replicas)])
    settings = ClusterConfig(kind=ClusterKind.ray, replicas=replicas, **options)
    return RolloutCluster(config, settings, pool), pool


def submit_all(cluster: RolloutCluster) -> None:
    for index, prompt in enumerate(PROMPTS):
        for sample in range(PARAMS.n):
            cluster.submit(prompt, PARAMS, prompt_index=index, sample_index=sample)


def key(rollout):
    return rollout.prompt_index, rollout.sample_index


def content(rollout):
    return (
        rollout.token_ids, rollout.logprobs, rollout.weight_versions, rollout.extras,
        rollout.finish_reason, rollout.seed, rollout.prompt_ids, rollout.text,
    )  # fmt: skip


def drain(cluster: RolloutCluster, between=lambda: None) -> dict:
    found = {}
    while cluster.has_unfinished:
        for rollout in cluster.step():
            assert key(rollout) not in found, "a rollout twice"
            found[key(rollout)] = content(rollout)
        between()
    return found


@pytest.fixture
def expected(config):
    engine = RolloutEngine.from_config(config, factory())
    return {key(each): content(each) for each in engine.generate(PROMPTS, PARAMS)}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_tokens_are_those_of_one_engine(config, expected, replicas):
    cluster, _ = cluster_of(config, replicas)
    try:
        submit_all(cluster)
        assert drain(cluster) == expected
    finally:
        cluster.close()
