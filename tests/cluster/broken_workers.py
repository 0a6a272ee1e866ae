"""Workers that cannot be built, each in its own way."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rollout.config import EngineConfig
from rollout.errors import CheckpointError
from rollout.models.loader import Progress


def dies(config: EngineConfig, progress: Progress | None = None) -> NoReturn:
    print("the driver of this GPU is of another age", file=sys.stderr, flush=True)
    os._exit(3)


def refuses(config: EngineConfig, progress: Progress | None = None) -> NoReturn:
    raise CheckpointError("model.safetensors is no more")
