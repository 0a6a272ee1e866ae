"""Attention and recurrence: planned once per step, run once per layer."""

from rollout.runner.attention.paged import PagedAttention
from rollout.runner.attention.recurrent import RecurrentStates, state_arrays, state_plan

__all__ = ["PagedAttention", "RecurrentStates", "state_arrays", "state_plan"]
