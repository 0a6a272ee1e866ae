"""Captured forwards over buckets of query rows: CUDA graphs, and on a CPU the calls of ops."""

from rollout.runner.graphs.buckets import Bucket, Buckets
from rollout.runner.graphs.forward_graphs import ForwardGraphs

__all__ = ["Bucket", "Buckets", "ForwardGraphs"]
