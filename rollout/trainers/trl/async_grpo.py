"""The parts for trl.experimental.async_grpo; apart, for TRL warns whoever imports that."""

from rollout.trainers.trl.rollout_worker import RolloutWorker
from rollout.trainers.trl.weight_transfer import WeightTransfer

__all__ = ["RolloutWorker", "WeightTransfer"]
