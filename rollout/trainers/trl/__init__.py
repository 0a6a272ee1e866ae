"""TRL 1.16: generation for its trainers, and a probe of their logprobs."""

from rollout.trainers.trl.mismatch import MismatchProbe
from rollout.trainers.trl.patch import specrollout_generation

__all__ = ["MismatchProbe", "specrollout_generation"]
