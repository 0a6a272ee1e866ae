"""TRL 1.16: generation for its trainers."""

from rollout.trainers.trl.patch import specrollout_generation

__all__ = ["specrollout_generation"]
