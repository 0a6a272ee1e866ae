"""specrollout: a speculative rollout engine for training language models with RL."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    # libgomp reads it as torch is imported. Idle threads then yield the core after microseconds
    # instead of milliseconds: on a busy machine, spinning ones made a step 5 to 20 times longer.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if os.environ.get("ROLLOUT_CPU_ISA", "amx") != "amx":
    # oneDNN reads it at its first product. Its products by tiles depend on the number of rows, and
    # differ from those of the processors that the named instruction set is to agree with.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

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

try:
    __version__ = version("specrollout")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

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
    "__version__",
]
