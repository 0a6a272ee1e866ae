"""One checkpoint, and one Ray for the tests that need no trainer.

Run from an environment of its own: tests/frameworks/verl/run.sh. Without verl nothing is collected.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if find_spec("verl") is None:
    collect_ignore_glob = ["*"]
else:
    os.environ |= {  # before verl is imported, here and in Ray's processes
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "VERL_PLATFORM": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # Where verl finds cpu_platform, and it our helper: from the root, sources would hide the wheel.
    sys.path[:0] = [str(HERE), str(HERE.parent / "shared")]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_checkpoint import save_tiny_qwen2

    return save_tiny_qwen2(tmp_path_factory.mktemp("tiny-qwen2"))


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    import ray_sessions

    paths = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": paths}}
    with ray_sessions.own_ray(num_cpus=8, namespace="test", runtime_env=environment):
        yield
