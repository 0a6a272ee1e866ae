"""A trainer's forward whose logprobs are the engine's, bit for bit: the ratio of its probabilities
to the rollout's is exactly 1."""

from rollout.trainers.exact.forward import exact_forward
from rollout.trainers.exact.logprobs import token_logprobs

__all__ = ["exact_forward", "token_logprobs"]
