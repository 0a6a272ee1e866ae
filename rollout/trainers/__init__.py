"""Weights out of trainers: a source for each way a model may be sharded, and the hook of a loop."""

from rollout.trainers.hook import RolloutHook, WeightReceiver, WeightSync
from rollout.trainers.weight_source import weight_source

__all__ = ["RolloutHook", "WeightReceiver", "WeightSync", "weight_source"]
