"""Weights and corpora of replicas that are Ray actors."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("ray")

from safetensors.torch import load_file

from rollout import ExternalState
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.cluster.opening import open_with
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.shared_memory import SharedMemorySender
from tests.cluster.ray_processes import replica_processes, wait_until_gone
from tests.cluster.workload import drain, ngram, submit_all
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.weight_transports import TensorSource, group_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_ray")]


@pytest.fixture(scope="module")
def cluster(own_ray, config) -> Iterator[RolloutCluster]:
    options = ClusterConfig(
        kind=ClusterKind.ray, replicas=2, num_cpus=1, report_seconds=0.005, share_seconds=0.02
    )
    cluster = open_with(config, ngram(), options)
    assert isinstance(cluster, RolloutCluster)
    yield cluster
    left = replica_processes()
    cluster.close()
    wait_until_gone(left, 60)


def test_weights_come_by_every_way_and_to_who_is_replaced(cluster, tmp_path):
    folders = [save_tiny_llama(tmp_path / str(seed), seed=seed) for seed in (21, 22, 23, 24)]
    policies = [load_file(folder / "model.safetensors") for folder in folders]
    digests = []
    cluster.update_weights_from_tensor(policies[0])
    digests.append(cluster.weights_digest())
    with SharedMemorySender(8192) as sender:
        cluster.update_weights_from_ipc(sender.handles(policies[1].items()))
    digests.append(cluster.weights_digest())
    with group_of(cluster, 3) as (group, threads):
        sender, source = DistributedSender(group), TensorSource(policies[2])
        sending = threads.submit(sender.send, source, 20)
        cluster.update_weights_from_distributed(**sender.arguments(source))
        sending.result(20)
    digests.append(cluster.weights_digest())
    cluster.update_weights_from_disk(folders[3])
    digests.append(cluster.weights_digest())
    assert len(set(digests)) == 4
    cluster.add_external_corpus("texts", token_chunks=[[5, 6, 7]], wait=True)
    submit_all(cluster)
    before = drain(cluster)
    assert {version for each in before.values() for version in each[2]} == {4}

    replica_processes()[0].kill()
    submit_all(cluster)
    assert drain(cluster) == before  # on the one that is left, and on the one that came
    deadline = time.monotonic() + 150
    while not cluster.members.all_joined or len(cluster.members.on_all("status")) < 2:
        cluster.step()
        assert time.monotonic() < deadline
    assert cluster.weights_digest() == digests[-1]
    assert set(cluster.members.on_all("weights_digest")) == {"replica-0", "replica-1"}
    while cluster.external_corpora()[0].state is not ExternalState.PUBLISHED:
        assert time.monotonic() < deadline


def test_what_one_actor_commits_the_other_learns(cluster):
    submit_all(cluster)
    drain(cluster)
    assert cluster.corpus_exchange is not None
    cluster.corpus_exchange.finish()
    submit_all(cluster)
    drain(cluster)
    for each in cluster.members.on_all("status").values():
        assert each.counters["corpus/shared_tokens"] > 0
        assert each.counters["corpus/learned_tokens"] > 0
