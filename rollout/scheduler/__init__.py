"""The scheduler: which requests run in a step, and with how many tokens and draft slots."""

from rollout.scheduler.length_forecast import LengthForecast
from rollout.scheduler.scheduler import Scheduler

__all__ = ["LengthForecast", "Scheduler"]
