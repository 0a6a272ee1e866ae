"""A small engine's configuration and its rollouts, and one small Ray for a module's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutEngine
from rollout.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from tests.cluster.workload import PARAMS, PROMPTS, content, key, ngram

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "GOMP_SPINCOUNT": "10000"}},
    )
    yield
    ray.shutdown()


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
    """What one engine gives for `submit_all`."""
    engine = RolloutEngine.from_config(config, ngram())
    return {key(each): content(each) for each in engine.generate(PROMPTS, PARAMS)}
