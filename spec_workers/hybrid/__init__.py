"""NGRAM and a neural draft together: the worker, the merge of their trees, and the draft's gate."""

from spec_workers.hybrid.hybrid_worker import HybridWorker, build, hybrid_sources

__all__ = ["HybridWorker", "build", "hybrid_sources"]
