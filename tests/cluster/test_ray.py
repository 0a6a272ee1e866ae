"""Replicas as Ray actors: the smoke test. What happens to their ranks is tested in `extended`."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("ray")

from safetensors.torch import load_file

from rollout import RolloutEngine
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.cluster.ray.pool import RayPool
from rollout.cluster.ray.replica import import_failure
from tests.cluster.ray_processes import replica_processes, wait_until_gone
from tests.cluster.workload import drain, ngram, rejoined, submit_all
from tests.helpers.hang import wait_until
from tests.helpers.tiny_model import save_tiny_llama


@pytest.fixture
def cluster(own_ray, config):
    """Two replicas that nobody looked at until they had opened: they are not late for that."""
    options = ClusterConfig(kind=ClusterKind.ray, replicas=2, num_cpus=1, report_seconds=0.005)
    pool = RayPool(config, ngram(), options)
    wait_until(lambda: pool._failure or pool._answers.qsize() >= 4)  # where each lives, its engine
    assert pool._failure is None
    pool._cluster = replace(options, start_seconds=0.01)
    cluster = RolloutCluster(config, options, pool)
    pool._cluster = options
    yield cluster
    left = replica_processes()
    cluster.close()
    wait_until_gone(left)


def test_two_actors_give_the_rollouts_of_one_engine_though_one_is_killed(
    cluster, config, expected, tmp_path
):
    submit_all(cluster)
    assert drain(cluster) == expected
    tensors = load_file(save_tiny_llama(tmp_path, seed=21) / "model.safetensors")
    engine = RolloutEngine.from_config(config, ngram())
    for each in (engine, cluster):
        each.update_weights_from_tensor(tensors)
        submit_all(each)
    cluster.corpus_exchange.finish()
    replica_processes()[0].kill()
    assert drain(cluster) == drain(engine)
    rejoined(cluster)
    assert cluster.weights_digest() == engine.weights_digest()
    for each in cluster.replicas.on_all(RolloutEngine.status).values():
        assert each.weight_versions == {"target": 1}


def test_what_ray_says_in_words_is_known_for_a_missing_module():
    said = "The actor failed to import on the worker:\n\nModuleNotFoundError: No module named 'x'\n"
    assert import_failure(RuntimeError(said)) == "No module named 'x'"
    assert import_failure(ImportError("libcuda.so.1")) == "libcuda.so.1"
    assert import_failure(RuntimeError("out of memory")) is None
