"""How far a trainer's logprobs are from the engine's, in which op they part, and why."""

from rollout.trainers.mismatch.compare import compare
from rollout.trainers.mismatch.result import Cause, Mismatch, OpDifference, Suspect

__all__ = ["Cause", "Mismatch", "OpDifference", "Suspect", "compare"]
