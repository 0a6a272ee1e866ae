from rollout.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
