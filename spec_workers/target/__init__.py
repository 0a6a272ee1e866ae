"""The target model as every worker verifies with it: its memory, its runner and what it scores."""

from spec_workers.target.target_worker import TargetWorker

__all__ = ["TargetWorker"]
