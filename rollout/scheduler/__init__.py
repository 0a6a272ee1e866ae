from rollout.scheduler.halving import Halving
from rollout.scheduler.length_forecast import LengthForecast
from rollout.scheduler.scheduler import Scheduler

__all__ = ["Halving", "LengthForecast", "Scheduler"]
