"""The data types that all parts share: parameters, requests, steps and rollouts."""

from rollout.types.enums import FinishReason, MemoryTag, PauseMode
from rollout.types.request import ChatMessages, Prompt, Request, StopCheck, TokenConstraint
from rollout.types.rollout import NO_EXTRAS, EmittedTokens, RequestStats, Rollout, TokenExtras
from rollout.types.sampling_params import SamplingParams
from rollout.types.step import (
    MAX_TREE_NODES,
    Batch,
    DraftTrees,
    EntryResult,
    Remaining,
    Scheduled,
    ScheduledStates,
    StepForecast,
    StepResult,
    StepTimes,
    Tail,
)

__all__ = [
    "MAX_TREE_NODES",
    "NO_EXTRAS",
    "Batch",
    "ChatMessages",
    "DraftTrees",
    "EmittedTokens",
    "EntryResult",
    "FinishReason",
    "MemoryTag",
    "PauseMode",
    "Prompt",
    "Remaining",
    "Request",
    "RequestStats",
    "Rollout",
    "SamplingParams",
    "Scheduled",
    "ScheduledStates",
    "StepForecast",
    "StepResult",
    "StepTimes",
    "StopCheck",
    "Tail",
    "TokenConstraint",
    "TokenExtras",
]
