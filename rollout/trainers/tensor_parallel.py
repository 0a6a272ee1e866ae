"""Tensor parallelism under the names that frameworks have for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError
from rollout.models.head_parts import check_shares
from rollout.models.spec import ModelSpec


def tensor_parallel(
    size: int, model_path: str | os.PathLike[str], field: str
) -> Mapping[str, Mapping[str, Any]]:
    """The overrides of an engine whose model is partitioned among ``size`` ranks.

    ``field``: the framework's name of ``size``. Raises InvalidInputError under that name where the
    model cannot be partitioned so.
    """
    if not isinstance(size, int) or size < 1:
        raise InvalidInputError(field, size, "must be a positive integer")
    if size == 1:
        return {}
    check_shares(ModelSpec.read(Path(model_path)), size, field)
    return {"parallel": {"mode": "tensor", "size": size}}
