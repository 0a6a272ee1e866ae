"""Question: do replicas as Ray actors give the rollouts of one engine in this process, at what
price, and how much of the accept length do they keep?

    python benchmarks/bench_cluster.py [--only same overhead sharing]

Engines run on one thread each, so that two replicas, or one and the process that drives it, have a
core each. Passes that are compared alternate. Bars: the same rollouts bit for bit, also with a
replica killed meanwhile, whose replacement takes requests within 20 s; at most 5 % of the time
beside a replica's steps, 1.05x an engine's CPU time, 5 % of a core for the router; with shared
corpora 0.95 of one engine's accept length.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
from harness.command import Command, parts_of
from harness.prompts import reasoning_prompts
from harness.rows import Row, row

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import EngineConfig, engine_config
from rollout.engine.protocol import Engine
from rollout.engine.worker_factory import worker_factory
from rollout.open_engine import open_with

WARM = SamplingParams(max_new_tokens=4)


def configured(options: argparse.Namespace, spec: str) -> tuple[EngineConfig, Any]:
    """An engine's configuration and its worker's factory."""
    config = engine_config(str(options.model.resolve()), {"max_running": 8, "num_threads": 1})
    # What is drafted must not depend on how fast it goes.
    own = {"budget": "fixed", "calibration_seconds": 0} if spec == "ngram" else {}
    return config, worker_factory(spec, **own)


@contextmanager
def cluster_of(
    options: argparse.Namespace, replicas: int, spec: str, **settings: Any
) -> Iterator[RolloutCluster]:
    ray = ClusterConfig(
        kind=ClusterKind.ray, replicas=replicas, num_cpus=1, address="local", **settings
    )
    cluster = open_with(*configured(options, spec), ray)
    assert isinstance(cluster, RolloutCluster)
    try:
        run(cluster, [[1, 2, 3]] * 2 * replicas, WARM)
        yield cluster
    finally:
        cluster.close()


def engine_of(options: argparse.Namespace, spec: str) -> RolloutEngine:
    engine = RolloutEngine.from_config(*configured(options, spec))
    run(engine, [[1, 2, 3]], WARM)
    return engine


def run(
    engine: Engine,
    prompts: list[Any],
    params: SamplingParams,
    between: Callable[[list[Rollout]], None] = lambda rollouts: None,
) -> list[Rollout]:
    for index, prompt in enumerate(prompts):
        for sample in range(params.n):
            engine.submit(prompt, params, prompt_index=index, sample_index=sample)
    rollouts: list[Rollout] = []
    while engine.has_unfinished:
        rollouts += engine.step()
        between(rollouts)
    return sorted(rollouts, key=lambda each: (each.prompt_index, each.sample_index))


def content(rollouts: list[Rollout]) -> list[Any]:
    return [(each.token_ids, each.logprobs, each.finish_reason) for each in rollouts]


def accept_length(rollouts: list[Rollout]) -> float:
    steps = sum(each.stats.verify_steps for each in rollouts)
    return 1 + sum(each.stats.accepted for each in rollouts) / steps


def same_rows(options: argparse.Namespace) -> Iterator[Row]:
    prompts = reasoning_prompts(options.prompts)
    params = SamplingParams(temperature=0.8, max_new_tokens=options.tokens, n=4, seed=1)
    expected = content(run(engine_of(options, "ngram"), prompts, params))
    with cluster_of(options, 2, "ngram") as cluster:
        same = content(run(cluster, prompts, params)) == expected
        yield row("2 replicas, the rollouts of 1 engine, bit for bit", float(same), "", 1.0)
        began_with = set(cluster.replicas.joined.values())
        killed_at: list[float] = []

        def kill_one(rollouts: list[Rollout]) -> None:
            if len(rollouts) >= 2 and not killed_at:
                os.kill(actors()[0].pid, signal.SIGKILL)
                killed_at.append(time.perf_counter())

        same = content(run(cluster, prompts, params, kill_one)) == expected
        yield row("the same with a replica killed meanwhile", float(same), "", 1.0)
        while (
            set(cluster.replicas.joined.values()) == began_with or not cluster.replicas.all_joined
        ):
            cluster.step()
        seconds = time.perf_counter() - killed_at[0]
        yield row("until its replacement takes requests", seconds, "s", 20.0, at_most=True)


def actors() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::ReplicaAct"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def overhead_rows(options: argparse.Namespace) -> Iterator[Row]:
    """The clock's time is compared within one pass; CPU time, which other work on the machine
    hardly changes, with passes of an engine in this process."""
    prompts = reasoning_prompts(options.prompts)
    params = SamplingParams(temperature=0.8, max_new_tokens=options.tokens, n=4, ignore_eos=True)
    beside, alone, actor, router = [], [], [], []
    engine = engine_of(options, "none")
    with cluster_of(options, 1, "none") as cluster:
        (replica,) = actors()
        for _ in range(options.repeats):
            began = time.process_time()
            run(engine, prompts, params)
            alone.append(time.process_time() - began)

            own, cpu = cluster.metrics().total_ms, _cpu_seconds(replica)
            began, started = time.process_time(), time.perf_counter()
            run(cluster, prompts, params)
            seconds = time.perf_counter() - started
            router.append((time.process_time() - began) / seconds)
            actor.append(_cpu_seconds(replica) - cpu)
            beside.append(seconds / ((cluster.metrics().total_ms - own) / 1e3) - 1)
    times = min(actor) / min(alone)
    yield row("time beside the replica's steps", min(beside), "share", 0.05, at_most=True)
    yield row("CPU time of a replica over an engine's", times, "x", 1.05, at_most=True)
    yield row("CPU time of the router and of Ray here", min(router), "core", 0.05, at_most=True)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def sharing_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Two epochs of every prompt."""
    prompts = reasoning_prompts(options.prompts)
    params = SamplingParams(temperature=0.7, max_new_tokens=options.tokens, n=4)
    epochs = [replace(params, seed=seed) for seed in range(2)]

    def second_epoch(engine: Engine) -> float:
        """Its accept length."""
        return [accept_length(run(engine, prompts, each)) for each in epochs][1]

    alone = second_epoch(engine_of(options, "ngram"))
    yield row("accept length of 1 engine, epoch 2", alone, "tokens")
    for shares, what in ((False, "without"), (True, "with sharing")):
        with cluster_of(options, 2, "ngram", share_corpus=shares, share_seconds=0.1) as cluster:
            ratio = second_epoch(cluster) / alone
        label = f"accept length over 1 engine's, epoch 2, {what}"
        yield row(label, ratio, "x", 0.95 if shares else None)


PARTS = {"same": same_rows, "overhead": overhead_rows, "sharing": sharing_rows}


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.option("--prompts", 6, quick=2)
    command.option("--tokens", 96, quick=16, help="per rollout, at most")
    command.repeats(3)
    return command


if __name__ == "__main__":
    make_command().run("a cluster of replicas", parts_of(PARTS))
