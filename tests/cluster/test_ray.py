"""Replicas as Ray actors: killed for real."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import psutil
import pytest

pytest.importorskip("ray")

from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.cluster.opening import open_with
from rollout.cluster.ray.pool import RayPool
from rollout.cluster.ray.replica import import_failure
from rollout.cluster.replica import Opened
from rollout.errors import CheckpointError, ClusterError
from tests.cluster import broken_workers
from tests.cluster.ray_processes import replica_processes, wait_until_gone
from tests.cluster.workload import drain, ngram, submit_all

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_ray")]

RECOVERY_SECONDS = 150.0  # 10 where nothing else runs


def settings(replicas: int, **options) -> ClusterConfig:
    return ClusterConfig(kind=ClusterKind.ray, replicas=replicas, num_cpus=1, **options)


@pytest.fixture(scope="module")
def cluster(own_ray, config) -> Iterator[RolloutCluster]:
    options = settings(2, report_seconds=0.005, max_deaths_per_request=100)
    cluster = open_with(config, ngram(), options)
    yield cluster
    left = replica_processes()
    cluster.close()
    wait_until_gone(left, 60)


def test_two_replicas_give_the_rollouts_of_one_engine(cluster, expected):
    submit_all(cluster)
    assert drain(cluster) == expected


def test_replicas_killed_at_random_are_not_seen_and_replaced(cluster, expected):
    rng = random.Random(5)
    kills = 0

    def kill_one() -> None:
        nonlocal kills
        processes = replica_processes()  # those that start, too
        if kills < 3 and processes and rng.random() < 0.3:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was dying since the last time
                rng.choice(processes).kill()
                kills += 1

    while kills < 3:  # again, where the rollouts ended before
        submit_all(cluster)
        assert drain(cluster, kill_one) == expected
    killed = time.monotonic()
    while not cluster.members.all_joined:
        cluster.members.attend(0.05)
        assert time.monotonic() - killed < RECOVERY_SECONDS
    submit_all(cluster)
    assert drain(cluster) == expected


def test_replicas_that_hang_are_not_seen_and_replaced(config, expected, tmp_path, caplog):
    """One is stopped as a debugger would; the step of the other never ends."""
    flag = tmp_path / "flag"
    options = settings(2, heartbeat_seconds=5.0, stall_seconds=5.0, max_deaths=100)
    before = replica_processes()
    hanging = open_with(config, partial(broken_workers.sticks, flag), options)
    stopped: list[psutil.Process] = []

    def hang() -> None:
        if not stopped and hanging.metrics().generated_tokens:
            stopped.append(next(each for each in replica_processes() if each not in before))
            stopped[0].suspend()
            flag.touch()

    try:
        submit_all(hanging)
        started = time.monotonic()
        assert drain(hanging, hang) == expected
        assert time.monotonic() - started < RECOVERY_SECONDS
        assert not flag.exists()
        assert "no sign of life for" in caplog.text
        assert "in one step or call" in caplog.text
        wait_until_gone(stopped, 60)
    finally:
        hanging.close()


def test_one_that_does_not_come_again_is_done_without(cluster, expected, monkeypatch, caplog):
    pool = cluster.members._pool
    monkeypatch.setattr(pool, "_cluster", replace(pool._cluster, start_seconds=0.01))
    replica_processes()[0].kill()
    submit_all(cluster)
    assert drain(cluster) == expected
    while not cluster.members.all_joined:
        cluster.members.attend(0.05)
    assert "go on without: replica-" in caplog.text


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


def test_what_cannot_be_sent_takes_no_turn(cluster):
    """The replica would wait for it, and all that comes later with it."""
    replica = next(iter(cluster.members.joined.values()))
    with pytest.raises(TypeError, match="pickle"):
        replica.call("learn_corpus_deltas", (each for each in []))
    assert replica.call("weights_digest").result(60)


def test_a_replica_that_opened_while_nobody_looked_is_not_late(config):
    pool = RayPool(config, ngram(), settings(1, start_seconds=0.5))
    try:
        deadline = time.monotonic() + 120
        while pool._answers.qsize() < 2:  # its residence, and its engine
            time.sleep(0.1)
            assert time.monotonic() < deadline
        assert [type(event) for event in pool.events(1.0)] == [Opened]
    finally:
        pool.close()
