"""specrollout: a speculative rollout engine for training language models with RL."""

from rollout.config import EngineConfig
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState, Publishing
from rollout.engine.engine import RolloutEngine
from rollout.engine.loop import EngineLoop
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
