"""The corpus of an engine that drafts from one."""

from __future__ import annotations

from ngram_native import Corpus
from rollout import RolloutEngine
from spec_workers.ngram import NgramWorker


def corpus_of(engine: RolloutEngine) -> Corpus:
    """Raises TypeError where there is none."""
    if not isinstance(engine.worker, NgramWorker):
        raise TypeError(f"{type(engine.worker).__name__} has no corpus")
    return engine.worker.corpus


def forget(engine: RolloutEngine) -> None:
    """What the corpus saw, where there is one."""
    if isinstance(engine.worker, NgramWorker):
        engine.worker.corpus.reset()
