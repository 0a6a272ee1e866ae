"""The scheduler: which requests run in a step, and with how many tokens and draft slots."""

from rollout.scheduler.length_forecast import LengthForecast
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.two_batch_overlap import TwoBatchOverlap

__all__ = ["LengthForecast", "Scheduler", "TwoBatchOverlap"]
