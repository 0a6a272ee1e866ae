"""specrollout: a speculative rollout engine for training language models with RL."""

from rollout.config import EngineConfig
from rollout.draft_corpus import ExternalCorpus, ExternalState
from rollout.engine import RolloutEngine
from rollout.types import FinishReason, Request, Rollout, SamplingParams

__all__ = [
    "EngineConfig",
    "ExternalCorpus",
    "ExternalState",
    "FinishReason",
    "Request",
    "Rollout",
    "RolloutEngine",
    "SamplingParams",
]
