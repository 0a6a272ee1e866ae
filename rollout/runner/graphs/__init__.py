"""CUDA graphs around the target's forward, over buckets of query rows."""

from rollout.runner.graphs.buckets import Bucket, Buckets
from rollout.runner.graphs.forward_graphs import ForwardGraphs

__all__ = ["Bucket", "Buckets", "ForwardGraphs"]
