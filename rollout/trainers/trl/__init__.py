"""TRL 1.16: generation for its trainers. The asynchronous one's part is in ``async_grpo``."""

from rollout.trainers.trl.patch import specrollout_generation
from rollout.trainers.trl.rollout_func import SpecRollout

__all__ = ["SpecRollout", "specrollout_generation"]
