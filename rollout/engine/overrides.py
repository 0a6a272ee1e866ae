"""Flat keyword overrides, as `from_pretrained` takes them, onto the nested configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rollout.config import (
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from rollout.errors import InvalidInputError


def engine_config(path: str, overrides: dict[str, Any]) -> EngineConfig:
    """Each override goes to the part that has a field of its name; names are unique across parts.

    ``parallel`` is a ParallelConfig, or a mapping of its fields.

    Raises InvalidInputError for a name no part has.
    """
    parts: dict[str, type] = {
        "model": ModelConfig,
        "memory": MemoryConfig,
        "scheduler": SchedulerConfig,
    }
    owner = {f.name: part for part, cls in parts.items() for f in fields(cls)}
    own = {f.name for f in fields(EngineConfig)} - parts.keys()
    chosen: dict[str, dict[str, Any]] = {part: {} for part in (*parts, "engine")}
    for name, value in overrides.items():
        if name in owner and name != "path":
            chosen[owner[name]][name] = value
        elif name in own:
            chosen["engine"][name] = value
        else:
            known = ", ".join(sorted((owner.keys() | own) - {"path"}))
            raise InvalidInputError(f"overrides[{name!r}]", value, f"unknown; there are {known}")
    parallel = chosen["engine"].pop("parallel", {})
    if not isinstance(parallel, ParallelConfig):
        names = [f.name for f in fields(ParallelConfig)]
        if not isinstance(parallel, Mapping) or not set(parallel) <= set(names):
            raise InvalidInputError("parallel", parallel, f"must map some of {', '.join(names)}")
        parallel = ParallelConfig(**parallel)
    return EngineConfig(
        model=ModelConfig(path=str(path), **chosen["model"]),
        memory=MemoryConfig(**chosen["memory"]),
        scheduler=SchedulerConfig(**chosen["scheduler"]),
        parallel=parallel,
        **chosen["engine"],
    )
