"""Workers that cannot be built, each in its own way."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from rollout.config import EngineConfig
from rollout.errors import CheckpointError
from rollout.models.loader import Progress


def dies(config: EngineConfig, progress: Progress | None = None) -> NoReturn:
    print("the driver of this GPU is of another age", file=sys.stderr, flush=True)
    time.sleep(1.0)  # until it is known where its log is: an answer on its way dies with it
    os._exit(3)


def refuses(config: EngineConfig, progress: Progress | None = None) -> NoReturn:
    raise CheckpointError("model.safetensors is no more")
