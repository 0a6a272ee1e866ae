"""One checkpoint, and one Ray for the tests that need no trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ |= {
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    "VERL_PLATFORM": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
sys.path.insert(0, str(Path(__file__).parent))  # where verl finds cpu_platform

import pytest
import ray
from tiny_checkpoint import save_tiny_qwen2


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen2(tmp_path_factory.mktemp("tiny-qwen2"))


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        namespace="test",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()
