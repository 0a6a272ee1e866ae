"""Fields that several readers of config.json have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import CheckpointError


def size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Raises CheckpointError where there is none and no default, or it is no whole number >= 1."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name}={value!r} must be a whole number >= 1")
    return value
