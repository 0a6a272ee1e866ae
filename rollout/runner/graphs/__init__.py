"""Captured forwards over buckets of query rows: CUDA graphs, and on a CPU the calls of ops."""

from rollout.runner.graphs.buckets import Bucket, Buckets
from rollout.runner.graphs.forward_graphs import ForwardGraphs, graphs_of_model

__all__ = ["Bucket", "Buckets", "ForwardGraphs", "graphs_of_model"]
