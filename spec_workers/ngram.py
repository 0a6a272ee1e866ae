"""NGRAM: drafts copied from what was rolled out before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ngram_native import Source
from rollout.config import EngineConfig
from rollout.models.checkpoint import Progress
from rollout.models.spec import ModelSpec
from rollout.parallel import follows
from rollout.types import Batch, DraftTrees, Request, Scheduled
from spec_workers.budget import DraftBudget
from spec_workers.corpus.ngram_corpus import NgramCorpus
from spec_workers.draft_tree import only_roots, spread
from spec_workers.options import NgramOptions, takes
from spec_workers.spec_worker import SpecWorker
from spec_workers.step.observation import Observation
from spec_workers.target import TargetWorker

SOURCES = tuple(source.name.lower() for source in Source)


class NgramWorker(SpecWorker):
    """Proposes the corpus's best tree for each request and feeds it every committed token.

    A request's prompt and output enter the corpus as it goes on, or all at once when it ends while
    drafting does not pay: each token once. The corpus outlives weight updates; it is told of them.
    """

    def __init__(
        self,
        target: TargetWorker,
        draft_corpus: NgramCorpus,
        *,
        num_draft_tokens: int,
        calibration_seconds: float,
        budget: DraftBudget,
    ) -> None:
        super().__init__(target, budget, calibration_seconds=calibration_seconds)
        self._draft_corpus = draft_corpus
        self.corpus = draft_corpus.corpus
        self._num_draft_tokens = num_draft_tokens
        self._feed = draft_corpus.feed

    @property
    def max_draft_tokens(self) -> int:
        return self._num_draft_tokens if self.budget.may_draft else 0

    @property
    def draft_corpus(self) -> NgramCorpus:
        return self._draft_corpus

    def prepare(self, batch: Batch) -> None:
        requests = (entry.request for entry in batch.entries)
        self._draft_corpus.begin_step(requests, self.weights.version)
        if self.budget.is_open:
            self._feed.catch_up(entry.request for entry in batch.entries if entry.samples)

    def propose(self, batch: Batch, floors_B: NDArray[np.float64]) -> DraftTrees:
        pays_B = (floors_B <= 1.0).tolist()
        drafting = [
            b
            for b, entry in enumerate(batch.entries)
            if pays_B[b] and entry.samples and self._feed.follows(entry.request)
        ]
        if not drafting:
            return only_roots(len(batch.entries))
        floor = float(floors_B[drafting].min())
        ids = np.array([batch.entries[b].request.request_id for b in drafting], dtype=np.int64)
        budgets = np.array(self._limits([batch.entries[b] for b in drafting]), dtype=np.int32)
        proposal = self.corpus.propose(ids, budgets, floor)
        trees = DraftTrees(
            offsets_B1=proposal.offsets_B1,
            tokens_N=proposal.tokens_N,
            parents_N=proposal.parents_N,
            depths_N=proposal.depths_N,
            masks_N=proposal.masks_N,
            probs_N=proposal.probabilities_N,
            sources_N=proposal.sources_N,
        )
        return spread(trees, drafting, len(batch.entries))

    def _limits(self, entries: Sequence[Scheduled]) -> list[int]:
        """The most nodes that each entry can use: the scheduler gave it slots for so many."""
        return [min(self._num_draft_tokens, entry.draft_slots.size) for entry in entries]

    def observe(self, step: Observation) -> None:
        if not step.was_asked:
            return
        for entry, num_nodes in zip(step.batch.entries, self._num_verified(step), strict=True):
            if entry.samples:
                self._feed.note_verified(entry.request, num_nodes)

    def _num_verified(self, step: Observation) -> list[int]:
        """The number of verified nodes of the corpus's proposal, its first ones, for each entry."""
        return [result.num_drafted for result in step.results]

    def release(self, request: Request) -> None:
        super().release(request)
        self._draft_corpus.release(request)

    def check_integrity(self, running: Iterable[Request]) -> None:
        super().check_integrity(running)
        self._draft_corpus.check_integrity()

    def counters(self) -> dict[str, float]:
        own = {f"corpus/{name}": value for name, value in self._draft_corpus.counters().items()}
        return super().counters() | own


@takes(NgramOptions)
def build(
    config: EngineConfig, progress: Progress | None, options: NgramOptions
) -> NgramWorker | TargetWorker:
    """A worker with a corpus of its own; of a rank that follows, its target.

    ``progress`` is told how far the weights are read. Raises InvalidInputError, naming the option;
    OSError for a ``corpus_path`` that cannot be read.
    """
    open_target = partial(TargetWorker, config, progress, draft_nodes=options.num_draft_tokens)
    if follows(config.parallel):
        return open_target()
    corpus, target = open_corpus(config, options), open_target()
    return NgramWorker(
        target,
        corpus,
        num_draft_tokens=options.num_draft_tokens,
        calibration_seconds=options.calibration_seconds,
        budget=options.make_budget(config, target, SOURCES),
    )


def open_corpus(config: EngineConfig, options: NgramOptions) -> NgramCorpus:
    """The corpus of a worker, before its target is loaded. Raises as `build` says."""
    return NgramCorpus(ModelSpec.read(Path(config.model.path)).vocab_size, options)
