"""What trl.experimental.async_grpo takes. Apart: importing that makes TRL warn that it may change."""

from rollout.trainers.trl.rollout_worker import RolloutWorker
from rollout.trainers.trl.weight_transfer import WeightTransfer

__all__ = ["RolloutWorker", "WeightTransfer"]
