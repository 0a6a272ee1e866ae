"""Attention: planned once per step, run once per layer."""

from rollout.attention.paged import PagedAttention

__all__ = ["PagedAttention"]
