"""Replicas as Ray actors against one engine in this process: the same rollouts, at what price.

Engines run on one thread each, so that two replicas, or one and the process that drives it, have a
core each. Passes that are compared alternate, and the fastest of each counts.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from table import Row, finish, parser, row
from workloads import reasoning_prompts

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.cluster.opening import open_with
from rollout.config import engine_config
from rollout.engine.protocol import Engine
from rollout.engine.worker import worker_factory

WARM = SamplingParams(max_new_tokens=4)


@contextmanager
def cluster_of(
    options: argparse.Namespace, replicas: int, spec: str, **settings: Any
) -> Iterator[RolloutCluster]:
    config = engine_config(str(options.model), {"max_running": 8, "num_threads": 1})
    cluster = open_with(
        config,
        factory(spec),
        ClusterConfig(
            kind=ClusterKind.ray, replicas=replicas, num_cpus=1, address="local", **settings
        ),
    )
    assert isinstance(cluster, RolloutCluster)
    try:
        run(cluster, [[1, 2, 3]] * 2 * replicas, WARM)
        yield cluster
    finally:
        cluster.close()


def engine_of(options: argparse.Namespace, spec: str) -> RolloutEngine:
    config = engine_config(str(options.model), {"max_running": 8, "num_threads": 1})
    engine = RolloutEngine.from_config(config, factory(spec))
    run(engine, [[1, 2, 3]], WARM)
    return engine


def factory(spec: str) -> Any:
    # What is drafted must not depend on how fast it goes.
    options = {"budget": "fixed", "calibration_seconds": 0} if spec == "ngram" else {}
    return worker_factory(spec, **options)


def run(
    engine: Engine, prompts: list[Any], params: SamplingParams, between: Any = None
) -> list[Rollout]:
    for index, prompt in enumerate(prompts):
        for sample in range(params.n):
            engine.submit(prompt, params, prompt_index=index, sample_index=sample)
    rollouts: list[Rollout] = []
    while engine.has_unfinished:
        rollouts += engine.step()
        if between is not None:
            between(rollouts)
    return sorted(rollouts, key=lambda each: (each.prompt_index, each.sample_index))


def content(rollouts: list[Rollout]) -> list[Any]:
    return [(each.token_ids, each.logprobs, each.finish_reason) for each in rollouts]


def accept_length(rollouts: list[Rollout]) -> float:
    steps = sum(each.stats.verify_steps for each in rollouts)
    return 1 + sum(each.stats.accepted for each in rollouts) / steps


def same_rollouts_and_recovery(options: argparse.Namespace, prompts: list[Any]) -> list[Row]:
    params = SamplingParams(temperature=0.8, max_new_tokens=options.tokens, n=4, seed=1)
    expected = content(run(engine_of(options, "ngram"), prompts, params))
    with cluster_of(options, 2, "ngram") as cluster:
        same = content(run(cluster, prompts, params)) == expected
        began_with = set(cluster.members.joined.values())
        killed_at: list[float] = []

        def kill_one(rollouts: list[Rollout]) -> None:
            if len(rollouts) >= 2 and not killed_at:
                os.kill(_actors()[0], signal.SIGKILL)
                killed_at.append(time.perf_counter())

        same_after = content(run(cluster, prompts, params, kill_one)) == expected
        while set(cluster.members.joined.values()) == began_with or not cluster.members.all_joined:
            cluster.step()
        seconds = time.perf_counter() - killed_at[0]
    return [
        row("2 replicas, the rollouts of 1 engine, bit for bit", float(same), "", 1.0),
        row("the same with a replica killed meanwhile", float(same_after), "", 1.0),
        row("until its replacement takes requests", seconds, "s", 20.0, at_most=True),
    ]


def _actors() -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::ReplicaAct"):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def overhead(options: argparse.Namespace, prompts: list[Any]) -> list[Row]:
    """In time of the clock, within one pass; in CPU time, which other work on the machine hardly
    changes, over passes of an engine in this process."""
    params = SamplingParams(temperature=0.8, max_new_tokens=options.tokens, n=4, ignore_eos=True)
    beside, alone, actor, router = [], [], [], []
    engine = engine_of(options, "none")
    with cluster_of(options, 1, "none") as cluster:
        (replica,) = map(psutil.Process, _actors())
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
    cpu = min(actor) / min(alone)
    return [
        row("time beside the replica's steps", min(beside), "share", 0.05, at_most=True),
        row("CPU time of a replica over an engine's", cpu, "x", 1.05, at_most=True),
        row("CPU time of the router and of Ray here", min(router), "core", 0.05, at_most=True),
    ]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def sharing(options: argparse.Namespace, prompts: list[Any]) -> list[Row]:
    """Two epochs of every prompt; then a third when one of two replicas is gone."""
    rows = []
    epochs = [
        SamplingParams(temperature=0.7, max_new_tokens=options.tokens, n=4, seed=seed)
        for seed in range(3)
    ]
    engine = engine_of(options, "ngram")
    alone = [accept_length(run(engine, prompts, params)) for params in epochs]
    for shares in (False, True):
        name = "with sharing" if shares else "without"
        with cluster_of(options, 2, "ngram", share_corpus=shares, share_seconds=0.1) as cluster:
            lengths = [accept_length(run(cluster, prompts, params)) for params in epochs[:2]]
            victim = cluster.members.joined["replica-0"]
            victim.kill()
            cluster.members.wait_until_gone(victim)
            lengths.append(accept_length(run(cluster, prompts, epochs[2])))
        for epoch, (length, one) in enumerate(zip(lengths, alone, strict=True)):
            what = f"epoch {epoch + 1}" if epoch < 2 else "epoch 3, one replica new"
            bar = 0.95 if shares else None
            rows.append(
                row(f"accept length over 1 engine's, {what}, {name}", length / one, "x", bar)
            )
    return [row("accept length of 1 engine, epoch 2", alone[1], "tokens"), *rows]


PARTS = {"same": same_rollouts_and_recovery, "overhead": overhead, "sharing": sharing}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments.add_argument("--prompts", type=int, default=6)
    arguments.add_argument("--tokens", type=int, default=96, help="per rollout, at most")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--only", choices=list(PARTS))
    options = arguments.parse_args()
    options.model = options.model.resolve()
    prompts = reasoning_prompts(options.prompts)
    rows: list[Row] = []
    for name, part in PARTS.items():
        if options.only in (None, name):
            rows += part(options, prompts)
    finish("a cluster of replicas", rows, options.json)


if __name__ == "__main__":
    main()
