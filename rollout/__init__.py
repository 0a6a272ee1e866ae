"""specrollout: a speculative rollout engine for training language models with RL."""

import os
import sys

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    # libgomp reads it as torch is imported. Idle threads then yield the core after microseconds
    # instead of milliseconds: on a busy machine, spinning ones made a step 5 to 20 times longer.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from rollout.config import EngineConfig
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState, Publishing
from rollout.engine.engine import RolloutEngine
from rollout.engine.engine_loop import EngineLoop
from rollout.errors import (
    EngineStateError,
    InvalidInputError,
    OutOfMemoryError,
    RolloutError,
    WeightUpdateError,
)
from rollout.types import FinishReason, Request, Rollout, SamplingParams

__all__ = [
    "EngineConfig",
    "EngineLoop",
    "EngineStateError",
    "ExternalCorpus",
    "ExternalState",
    "FinishReason",
    "InvalidInputError",
    "OutOfMemoryError",
    "Publishing",
    "Request",
    "Rollout",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "WeightUpdateError",
]
