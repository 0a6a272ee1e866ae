"""CUDA graphs around the target's forward, over buckets of query rows."""

from rollout.graphs.buckets import Bucket, Buckets
from rollout.graphs.forward_graphs import ForwardGraphs

__all__ = ["Bucket", "Buckets", "ForwardGraphs"]
