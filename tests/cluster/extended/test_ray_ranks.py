"""Replicas of two ranks, each a Ray actor: any of them may be killed or hang, and none is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("ray")

from safetensors.torch import load_file

from rollout import ExternalState, RolloutEngine
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import EngineConfig, ParallelConfig, ParallelMode
from rollout.errors import CheckpointError, ClusterError, InvalidInputError
from rollout.open_engine import open_with
from tests.cluster import broken_workers
from tests.cluster.ray_processes import placement_groups, replica_processes, wait_until_gone
from tests.cluster.workload import drain, generated, ngram, rejoined, submit_all
from tests.helpers.hang import wait_until
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.weight_transports import opened

pytestmark = pytest.mark.usefixtures("own_ray")


def settings(replicas: int, **options) -> ClusterConfig:
    return ClusterConfig(kind=ClusterKind.ray, replicas=replicas, **({"num_cpus": 1} | options))


@pytest.fixture(scope="module")
def on_ranks(config: EngineConfig) -> EngineConfig:
    return replace(config, parallel=ParallelConfig(mode=ParallelMode.tensor, size=2))


def test_an_engine_that_cannot_be_made_raises_its_own_error(config, on_ranks):
    with pytest.raises(CheckpointError, match=r"^rank 1 of 2: .* is no more$"):
        open_with(on_ranks, broken_workers.refuses_on_rank_1, settings(1))
    with pytest.raises(ClusterError, match=r"replica-0 died 1 times .*: rank 1 of 2: ") as caught:
        open_with(on_ranks, broken_workers.dies_on_rank_1, settings(1, max_deaths=1))
    assert "the driver of this GPU is of another age" in str(caught.value)
    with pytest.raises(ClusterError, match=r"replica-0 .* lacks .* named 'kernels\w*'"):
        open_with(config, broken_workers.lacks, settings(1, max_deaths=1))
    with pytest.raises(TypeError, match="pickle"):
        open_with(config, partial(broken_workers.lacks, progress=(i for i in [])), settings(1))
    wait_until(lambda: not placement_groups())
    wait_until(lambda: not replica_processes())


@pytest.fixture(scope="module")
def flag(tmp_path_factory) -> Path:
    """Whichever rank finds it, hangs in its step."""
    return tmp_path_factory.mktemp("hang") / "flag"


@pytest.fixture(scope="module")
def cluster(own_ray, on_ranks, flag) -> Iterator[RolloutCluster]:
    options = settings(
        2, report_seconds=0.005, share_seconds=0.02, max_deaths=100, max_deaths_per_request=100
    )
    cluster = open_with(on_ranks, partial(broken_workers.sticks, flag), options)
    assert isinstance(cluster, RolloutCluster)
    yield cluster
    left = replica_processes()
    cluster.close()
    wait_until_gone(left)
    wait_until(lambda: not placement_groups())


def ranks_of(cluster: RolloutCluster, name: str) -> list[psutil.Process]:
    """The processes of a replica, by rank."""
    ranks = cluster.replicas._pool._named[name].replica.ranks
    return [psutil.Process(each.location.pid) for each in ranks]


def run_while(cluster: RolloutCluster, hit: Callable[[], None]) -> list[dict]:
    """The rollouts of all requests, again and again until replicas were hit as they generated."""
    found, hits = [], []
    tokens = cluster.metrics().generated_tokens

    def hit_once() -> None:
        if not hits and cluster.metrics().generated_tokens > tokens:
            hits.append(True)
            hit()

    while not hits:
        submit_all(cluster)
        found.append(drain(cluster, hit_once))
    return found


def test_replicas_of_two_ranks_give_the_rollouts_of_one_engine(cluster, expected, caplog):
    for _ in range(2):
        assert generated(cluster) == expected
        cluster.corpus_exchange.finish()
    for each in cluster.replicas.on_all(RolloutEngine.status).values():
        assert each.counters["corpus/shared_tokens"] > 0
        assert each.counters["corpus/learned_tokens"] > 0
    assert "died" not in caplog.text


def test_killed_ranks_are_not_seen_and_their_replicas_replaced(cluster, expected, caplog):
    first, second = (ranks_of(cluster, name) for name in ("replica-0", "replica-1"))
    assert all(each == expected for each in run_while(cluster, first[0].kill))
    assert all(each == expected for each in run_while(cluster, second[1].kill))
    rejoined(cluster)
    for name in ("replica-0", "replica-1"):
        assert f"{name} died and is started anew: rank " in caplog.text
    wait_until_gone(first + second)
    wait_until(lambda: len(placement_groups()) == 2)
    assert generated(cluster) == expected


def test_ranks_that_hang_are_not_seen_and_their_replicas_replaced(
    cluster, expected, flag, monkeypatch, caplog
):
    """One is stopped as a debugger would; the step of another never ends."""
    limits = cluster.replicas._pool._heartbeats
    ranks = ranks_of(cluster, "replica-1")
    for limit, seconds, hang, sign in (
        ("_silence_seconds", 10.0, ranks[1].suspend, "rank 1 of 2: no sign of life for"),
        ("_stall_seconds", 5.0, flag.touch, "in one step or call"),
    ):
        with monkeypatch.context() as patch:  # who comes anew may take its time
            patch.setattr(limits, limit, seconds)
            assert all(each == expected for each in run_while(cluster, hang))
            while flag.exists():  # the rollouts ended before
                assert generated(cluster) == expected
            wait_until(lambda sign=sign: sign in caplog.text, cluster.step)
        rejoined(cluster)
    wait_until_gone(ranks)


def test_an_update_reaches_every_rank_of_every_replica_or_none(cluster, config, tmp_path):
    """A replica that loses a rank meanwhile goes on with new ones."""
    engine = RolloutEngine.from_config(config, ngram())
    for seed, kind in enumerate(("collection", "shared_memory", "distributed", "disk"), 21):
        tensors = load_file(save_tiny_llama(tmp_path / kind, seed=seed) / "model.safetensors")
        with opened(kind, cluster, tmp_path / "new", world_size=5) as update:
            update(tensors)
        engine.update_weights_from_tensor(tensors)
        assert cluster.weights_digest() == engine.weights_digest()
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight"):
        cluster.update_weights_from_tensor(tensors | {"model.norm.weight": torch.ones(3)})
    assert cluster.can_run
    assert cluster.weights_digest() == engine.weights_digest()

    cluster.add_external_corpus("texts", token_chunks=[[5, 6, 7]], wait=True)
    pairs = [(name, tensor * 2) for name, tensor in tensors.items()]
    engine.update_weights_from_tensor(pairs)
    ranks = ranks_of(cluster, "replica-1")
    cluster.begin_weight_update()
    cluster.update_weights_from_tensor(pairs[:5])
    ranks[1].kill()
    cluster.update_weights_from_tensor(pairs[5:])
    cluster.end_weight_update()
    wait_until_gone(ranks)
    rejoined(cluster)
    assert cluster.weights_digest() == engine.weights_digest()
    assert set(cluster.replicas.on_all(RolloutEngine.weights_digest)) == {"replica-0", "replica-1"}
    assert cluster.external_corpora()[0].state is ExternalState.PUBLISHED
    assert generated(cluster) == generated(engine)
