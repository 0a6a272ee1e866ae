"""The engine that a configuration asks for: one in this process, or replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.cluster.config import ClusterConfig
from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.engine_protocol import Engine
from rollout.models.loader import Progress
from rollout.specs import factory_of


def open_engine(
    config: EngineConfig,
    spec: Mapping[str, Any],
    cluster: ClusterConfig,
    progress: Progress | None = None,
) -> Engine:
    """Ready to generate.

    Args:
        spec: ``_target_`` names the function that builds the worker; the other keys are its
            options.
        progress: told how far the model's weights are read.

    Raises what `RolloutEngine.from_config` does.
    """
    return RolloutEngine.from_config(config, factory_of(spec), progress)
