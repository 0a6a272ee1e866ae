"""specrollout: a speculative rollout engine for training language models with RL."""

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.types import FinishReason, Request, Rollout, SamplingParams

__all__ = [
    "EngineConfig",
    "FinishReason",
    "Request",
    "Rollout",
    "RolloutEngine",
    "SamplingParams",
]
