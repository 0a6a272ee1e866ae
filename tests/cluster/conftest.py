"""A small engine's configuration and its rollouts, and one small Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutEngine
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.engine.worker_factory import WorkerFactory
from tests.cluster.thread_pool import OnSubmit, ThreadPool
from tests.cluster.workload import always_drafts, generated, ngram
from tests.frameworks.shared import ray_sessions
from tests.helpers.forked import ROOT

MakeCluster = Callable[..., tuple[RolloutCluster, ThreadPool]]


@pytest.fixture(scope="session")
def own_ray() -> Iterator[str]:
    """A Ray of this process alone, in a folder of its own; where it listens."""
    ray = pytest.importorskip("ray")
    with ExitStack() as at_end:
        with pytest.MonkeyPatch.context() as patch:  # for actors, which Ray's own processes start
            path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
            patch.setenv("PYTHONPATH", os.pathsep.join(path))
            patch.setenv("GOMP_SPINCOUNT", "10000")
            patch.delenv("RAY_ADDRESS", raising=False)
            at_end.enter_context(ray_sessions.own_ray(num_cpus=4, log_to_driver=False))
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="session")
def config(tiny_model_path: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(tiny_model_path)),
        memory=MemoryConfig(max_kv_tokens=2048),
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=64),
        num_threads=1,
    )


@pytest.fixture(scope="session")
def expected(config: EngineConfig) -> dict[Any, Any]:
    """One engine's rollouts of the requests that `submit_all` submits."""
    return generated(RolloutEngine.from_config(config, ngram()))


@pytest.fixture(scope="session")
def text_config(config: EngineConfig, text_model_path: Path) -> EngineConfig:
    """The configuration of a model that reads text."""
    return replace(config, model=ModelConfig(path=str(text_model_path)))


@contextmanager
def cluster_maker(config: EngineConfig, usual: WorkerFactory) -> Iterator[MakeCluster]:
    """Makes clusters of replicas on threads, each with its pool, and closes them at the end."""
    with ExitStack() as made:

        def make(
            replicas: int = 2,
            factory: WorkerFactory = usual,
            *,
            on_submit: OnSubmit | None = None,
            **options: Any,
        ) -> tuple[RolloutCluster, ThreadPool]:
            names = [f"replica-{i}" for i in range(replicas)]
            pool = ThreadPool(config, factory, names, on_submit)
            settings = ClusterConfig(kind=ClusterKind.ray, replicas=replicas, **options)
            cluster = RolloutCluster(config, settings, pool)
            made.callback(cluster.close)
            return cluster, pool

        yield make


@pytest.fixture
def make(text_config: EngineConfig) -> Iterator[MakeCluster]:
    """Clusters that draft in every step, share often and read text."""
    with cluster_maker(text_config, always_drafts()) as make:
        yield partial(make, share_seconds=0.005)


@pytest.fixture
def make_cluster(config: EngineConfig) -> Iterator[MakeCluster]:
    """Clusters as configured by default."""
    with cluster_maker(config, ngram()) as make:
        yield make
