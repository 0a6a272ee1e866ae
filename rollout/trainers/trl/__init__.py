"""TRL 1.16: three ways in, one page in docs/trl.md."""

from rollout.trainers.trl.rollout_func import SpecRollout
from rollout.trainers.trl.rollout_worker import RolloutWorker
from rollout.trainers.trl.swap import specrollout_generation
from rollout.trainers.trl.weight_transfer import WeightTransfer

__all__ = ["RolloutWorker", "SpecRollout", "WeightTransfer", "specrollout_generation"]
