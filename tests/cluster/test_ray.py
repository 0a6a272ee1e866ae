"""Replicas as Ray actors: killed and stopped for real, and brought weights and corpora."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from safetensors.torch import load_file

from rollout import ExternalState
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.cluster.ray import heartbeats
from rollout.cluster.ray.pool import RayPool
from rollout.cluster.ray.replica import import_failure
from rollout.config import EngineConfig
from rollout.errors import CheckpointError, ClusterError
from rollout.open_engine import open_with
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.shared_memory import SharedMemorySender
from tests.cluster import broken_workers
from tests.cluster.ray_processes import replica_processes, wait_until_gone
from tests.cluster.workload import drain, ngram, rejoined, submit_all
from tests.helpers.forked import forked
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.weight_transports import TensorSource, group_of

pytestmark = pytest.mark.usefixtures("own_ray")


def settings(replicas: int, **options) -> ClusterConfig:
    return ClusterConfig(kind=ClusterKind.ray, replicas=replicas, num_cpus=1, **options)


@pytest.fixture(scope="module")
def flag(tmp_path_factory) -> Path:
    """Whichever replica finds it, hangs."""
    return tmp_path_factory.mktemp("hang") / "flag"


@pytest.fixture(scope="module")
def cluster(own_ray, config, flag) -> Iterator[RolloutCluster]:
    """Two replicas that nobody looked at until they had opened: they are not late for that."""
    options = settings(
        2, report_seconds=0.005, share_seconds=0.02, heartbeat_seconds=HANG_SECONDS, max_deaths=100,
        max_deaths_per_request=100,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # looked at each second, for the test of hangs
        patch.setattr(heartbeats, "_CHECKS", HANG_SECONDS)
        pool = RayPool(config, partial(broken_workers.sticks, flag), options)
    wait_until(lambda: pool._failure or pool._answers.qsize() >= 4)  # where each lives, its engine
    assert pool._failure is None
    pool._cluster = replace(options, start_seconds=0.01)
    cluster = RolloutCluster(config, options, pool)
    pool._cluster = options
    yield cluster
    left = replica_processes()
    cluster.close()
    wait_until_gone(left)


def test_two_replicas_give_the_rollouts_of_one_engine(cluster, expected):
    submit_all(cluster)
    assert drain(cluster) == expected


def test_what_one_actor_commits_the_other_learns(cluster):
    assert cluster.corpus_exchange is not None
    cluster.corpus_exchange.finish()
    submit_all(cluster)
    drain(cluster)
    for each in cluster.replicas.on_all("status").values():
        assert each.counters["corpus/shared_tokens"] > 0
        assert each.counters["corpus/learned_tokens"] > 0


def test_replicas_killed_at_random_are_not_seen_and_replaced(cluster, expected):
    rng = random.Random(5)
    kills = 0

    def kill_one() -> None:
        nonlocal kills
        processes = replica_processes()  # those that start, too
        if kills < 2 and processes and rng.random() < 0.3:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was dying since the last time
                rng.choice(processes).kill()
                kills += 1

    while kills < 2:  # again, where the rollouts ended before
        submit_all(cluster)
        assert drain(cluster, kill_one) == expected
    rejoined(cluster)
    submit_all(cluster)
    assert drain(cluster) == expected


def test_replicas_that_hang_are_not_seen_and_replaced(cluster, expected, flag, monkeypatch, caplog):
    """One is stopped as a debugger would; the step of the other never ends."""
    limits = cluster.replicas._pool._heartbeats
    monkeypatch.setattr(limits, "_silence_seconds", 5.0)
    monkeypatch.setattr(limits, "_stall_seconds", 5.0)
    stopped: list[psutil.Process] = []
    tokens = cluster.metrics().generated_tokens

    def hang() -> None:
        if not stopped and cluster.metrics().generated_tokens > tokens:
            stopped.append(replica_processes()[0])
            stopped[0].suspend()
            flag.touch()

    while not stopped or flag.exists():  # again, where the rollouts ended before
        submit_all(cluster)
        assert drain(cluster, hang) == expected
    signs = ("no sign of life for", "in one step or call")
    wait_until(lambda: all(sign in caplog.text for sign in signs), cluster.step)
    wait_until_gone(stopped)
    monkeypatch.undo()  # who comes anew may take its time
    rejoined(cluster)


def test_one_that_does_not_come_again_is_done_without(cluster, expected, monkeypatch, caplog):
    pool = cluster.replicas._pool
    monkeypatch.setattr(pool, "_cluster", replace(pool._cluster, start_seconds=0.01))
    replica_processes()[0].kill()
    submit_all(cluster)
    assert drain(cluster) == expected
    rejoined(cluster)
    assert "go on without: replica-" in caplog.text


def test_what_cannot_be_sent_takes_no_turn(cluster):
    """The replica would wait for it, and all that comes later with it."""
    replica = next(iter(cluster.replicas.joined.values()))
    with pytest.raises(TypeError, match="pickle"):
        replica.call("learn_corpus_deltas", (each for each in []))
    assert replica.call("weights_digest").result(HANG_SECONDS)


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
        sending = threads.submit(sender.send, source)
        cluster.update_weights_from_distributed(**sender.arguments(source))
        sending.result()
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
    rejoined(cluster)
    assert cluster.weights_digest() == digests[-1]
    assert set(cluster.replicas.on_all("weights_digest")) == {"replica-0", "replica-1"}
    wait_until(lambda: cluster.external_corpora()[0].state is ExternalState.PUBLISHED)


def test_one_that_dies_too_often_ends_it_with_its_last_words(config):
    with pytest.raises(ClusterError, match="replica-0 died 1 times") as caught:
        open_with(config, broken_workers.dies, settings(1, max_deaths=1))
    assert "the driver of this GPU is of another age" in str(caught.value)


def test_what_ray_says_in_words_is_known_for_a_missing_module():
    said = "The actor failed to import on the worker:\n\nModuleNotFoundError: No module named 'x'\n"
    assert import_failure(RuntimeError(said)) == "No module named 'x'"
    assert import_failure(ImportError("libcuda.so.1")) == "libcuda.so.1"
    assert import_failure(RuntimeError("out of memory")) is None


def test_an_engine_that_cannot_be_made_raises_its_own_error(config):
    with pytest.raises(CheckpointError, match="is no more"):
        open_with(config, broken_workers.refuses, settings(1))
    with pytest.raises(ClusterError, match=r"replica-0 .* lacks .* named 'kernels\w*'"):
        open_with(config, broken_workers.lacks, settings(1, max_deaths=1))
    with pytest.raises(TypeError, match="pickle"):
        open_with(config, partial(broken_workers.refuses, progress=(i for i in [])), settings(1))


def opened(pipe: Connection, config: EngineConfig) -> None:
    try:
        open_with(config, ngram(), settings(1))
    except ClusterError as error:
        pipe.send(str(error))


def test_a_ray_that_cannot_start_is_a_clusters_error(config, tmp_path):
    """Its sockets' names would be too long for the system."""
    mine, theirs = Pipe()
    folder = tmp_path / ("long" * 30)
    process = forked(opened, theirs, config, environment={"RAY_TMPDIR": str(folder)})
    theirs.close()
    try:
        assert mine.recv().startswith("Ray cannot start on this machine: ")
    finally:
        process.kill()
        process.join()
