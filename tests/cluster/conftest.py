"""One small Ray for a module's tests, whose workers find the packages under test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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
