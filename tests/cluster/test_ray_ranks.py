"""Replicas of two ranks, each a Ray actor: any of them may be killed or hang, and none is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

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
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.shared_memory import SharedMemorySender
from tests.cluster import broken_workers
from tests.cluster.ray_processes import placement_groups, replica_processes, wait_until_gone
from tests.cluster.workload import PARAMS, PROMPTS, content, drain, key, ngram, rejoined, submit_all
from tests.helpers.hang import wait_until
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.weight_transports import TensorSource, group_of

pytestmark = pytest.mark.usefixtures("own_ray")


def settings(replicas: int, **options) -> ClusterConfig:
    return ClusterConfig(kind=ClusterKind.ray, replicas=replicas, **({"num_cpus": 1} | options))


@pytest.fixture(scope="module")
def on_ranks(config: EngineConfig) -> EngineConfig:
    return replace(config, parallel=ParallelConfig(mode=ParallelMode.tensor, size=2, check=True))


def test_ranks_that_find_no_room_are_an_error_that_says_what_there_is(on_ranks):
    wanted = "It needs 2 ranks on one machine, of 3 CPUs and 0 GPUs each"
    with pytest.raises(ClusterError, match=f"start_seconds.*{wanted}") as caught:
        open_with(on_ranks, ngram(), settings(1, num_cpus=3, start_seconds=0.5))
    assert "'CPU': 4.0" in str(caught.value)
    wait_until(lambda: not placement_groups())


def test_a_rank_that_fails_as_it_starts_is_named(on_ranks):
    with pytest.raises(CheckpointError, match=r"^rank 1 of 2: .* is no more$"):
        open_with(on_ranks, broken_workers.refuses_on_rank_1, settings(1))
    with pytest.raises(ClusterError, match=r"replica-0 died 1 times .*: rank 1 of 2: ") as caught:
        open_with(on_ranks, broken_workers.dies_on_rank_1, settings(1, max_deaths=1))
    assert "the driver of this GPU is of another age" in str(caught.value)
    wait_until(lambda: not placement_groups())
    wait_until(lambda: not replica_processes())


@pytest.fixture(scope="module")
def cluster(own_ray, on_ranks) -> Iterator[RolloutCluster]:
    options = settings(
        2, report_seconds=0.005, share_seconds=0.02, max_deaths=100, max_deaths_per_request=100
    )
    cluster = open_with(on_ranks, ngram(), options)
    assert isinstance(cluster, RolloutCluster)
    yield cluster
    left = replica_processes()
    assert len(left) == 4
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
    """Their ranks compare drafts in each step, those of the other replica's rollouts too."""
    for _ in range(2):
        submit_all(cluster)
        assert drain(cluster) == expected
        cluster.corpus_exchange.finish()
    for each in cluster.replicas.on_all("status").values():
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
    submit_all(cluster)
    assert drain(cluster) == expected


def test_a_rank_that_hangs_is_not_seen_and_its_replica_replaced(
    cluster, expected, monkeypatch, caplog
):
    monkeypatch.setattr(cluster.replicas._pool._heartbeats, "_silence_seconds", 10.0)
    ranks = ranks_of(cluster, "replica-1")
    assert all(each == expected for each in run_while(cluster, ranks[1].suspend))
    wait_until_gone(ranks)
    monkeypatch.undo()
    rejoined(cluster)
    assert "rank 1 of 2: no sign of life for" in caplog.text


def test_it_pauses_sleeps_and_is_sound(cluster, expected):
    submit_all(cluster)
    cluster.step()
    cluster.pause_generation("retract")
    cluster.continue_generation()
    assert drain(cluster) == expected
    freed = cluster.release_memory()
    assert freed["weights"] > 0
    cluster.resume_memory()
    cluster.flush_cache()
    submit_all(cluster)
    assert drain(cluster) == expected
    some = expected[0, 0]
    assert cluster.score_with_extras(PROMPTS[0], some[0], PARAMS)[0] == some[1]
    cluster.check_integrity()


def test_an_update_reaches_every_rank_of_every_replica_or_none(cluster, config, tmp_path):
    """By every way; also a replica that loses a rank meanwhile, which goes on with new ones."""
    folders = [save_tiny_llama(tmp_path / str(seed), seed=seed) for seed in (21, 22, 23, 24)]
    policies = [load_file(folder / "model.safetensors") for folder in folders]
    engine = RolloutEngine.from_config(config, ngram())
    digests = []
    for folder in folders:
        engine.update_weights_from_disk(folder)
        digests.append(engine.weights_digest())

    cluster.update_weights_from_tensor(policies[0])
    assert cluster.weights_digest() == digests[0]
    with SharedMemorySender(8192) as sender:
        cluster.update_weights_from_ipc(sender.handles(policies[1].items()))
    assert cluster.weights_digest() == digests[1]
    with group_of(cluster, 5) as (group, threads):
        sender, source = DistributedSender(group), TensorSource(policies[2])
        sending = threads.submit(sender.send, source)
        cluster.update_weights_from_distributed(**sender.arguments(source))
        sending.result()
    assert cluster.weights_digest() == digests[2]
    wrong = policies[0] | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight"):
        cluster.update_weights_from_tensor(wrong)
    assert cluster.can_run
    assert cluster.weights_digest() == digests[2]

    cluster.add_external_corpus("texts", token_chunks=[[5, 6, 7]], wait=True)
    ranks = ranks_of(cluster, "replica-1")
    cluster.begin_weight_update()
    parts = [dict(list(policies[3].items())[part]) for part in (slice(5), slice(5, None))]
    cluster.update_weights_from_tensor(parts[0])
    ranks[1].kill()
    cluster.update_weights_from_tensor(parts[1])
    cluster.end_weight_update()
    assert cluster.weights_digest() == digests[3]
    wait_until_gone(ranks)
    rejoined(cluster)
    assert cluster.weights_digest() == digests[3]
    assert set(cluster.replicas.on_all("weights_digest")) == {"replica-0", "replica-1"}
    assert cluster.external_corpora()[0].state is ExternalState.PUBLISHED
    wanted = {key(each): content(each) for each in engine.generate(PROMPTS, PARAMS)}
    submit_all(cluster)
    assert drain(cluster) == wanted
