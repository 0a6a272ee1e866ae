"""NGRAM: drafts copied from what was rolled out before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ngram_native import Source
from rollout.config import EngineConfig
from rollout.models.loader import Progress
from rollout.models.spec import ModelSpec
from rollout.types import MAX_TREE_NODES, Batch, DraftTrees, Request, Scheduled
from spec_workers.budget import DraftBudget, FixedBudget, LearnedBudget
from spec_workers.budget.cost_run import calibrate
from spec_workers.draft_tree import only_roots, spread
from spec_workers.ngram_corpus import NgramCorpus
from spec_workers.observation import Observation
from spec_workers.options import check_budget, check_number
from spec_workers.target import TargetWorker
from spec_workers.worker import SpecWorker

_LEARNED_PER_STEP = 16_384
"""Tokens of other engines that a step takes in: some milliseconds."""

SOURCES = tuple(source.name.lower() for source in Source)


class NgramWorker(SpecWorker):
    """Proposes the corpus's best tree for each request and feeds it every committed token.

    A request's prompt and output enter the corpus as it goes on, or all at once when it ends while
    drafting does not pay: each token once. The corpus outlives weight updates; it is told of them.
    """

    supports_overlap = True

    def __init__(
        self,
        target: TargetWorker,
        draft_corpus: NgramCorpus,
        *,
        num_draft_tokens: int,
        calibration_seconds: float,
        budget: DraftBudget,
    ) -> None:
        """See `build` for the options."""
        super().__init__(target, budget)
        self._draft_corpus = draft_corpus
        draft_corpus.join(target.ranks.tensor)
        self.corpus = draft_corpus.corpus
        self._num_draft_tokens = num_draft_tokens
        self._calibration_seconds = calibration_seconds
        self._feed = draft_corpus.feed
        self._fed_version = self.weights.version

    @property
    def max_draft_tokens(self) -> int:
        return self._num_draft_tokens if self.budget.is_open else 0

    @property
    def draft_corpus(self) -> NgramCorpus:
        return self._draft_corpus

    def prepare(self, batch: Batch) -> None:
        self._draft_corpus.publish()
        if self.weights.version != self._fed_version:
            self._feed.catch_up_all()  # while the corpus takes them for the old policy's
            self._fed_version = self.weights.version
        self.corpus.set_weight_version(self.weights.version)
        if self._draft_corpus.outbox is not None:
            self._draft_corpus.outbox.follow(entry.request for entry in batch.entries)
        if self._draft_corpus.inbox is not None:
            self._draft_corpus.inbox.feed(self.weights.version, _LEARNED_PER_STEP)
        if self.budget.is_open:
            self._feed.catch_up(entry.request for entry in batch.entries if entry.samples)

    def propose(self, batch: Batch, floor: float) -> DraftTrees:
        drafting = [
            b
            for b, entry in enumerate(batch.entries)
            if entry.samples and self._feed.follows(entry.request)
        ]
        if not drafting:
            return only_roots(len(batch.entries))
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
        """Nodes worth asking for of each: the scheduler has slots for those that it can use."""
        return [min(self._num_draft_tokens, entry.draft_slots.size) for entry in entries]

    def observe(self, step: Observation) -> None:
        if not step.was_asked:
            return
        for entry, num_nodes in zip(step.batch.entries, self._num_verified(step), strict=True):
            if entry.samples:
                self._feed.note_verified(entry.request, num_nodes)

    def _num_verified(self, step: Observation) -> list[int]:
        """How many first nodes of the corpus's proposal were verified, for each entry."""
        return [result.num_drafted for result in step.results]

    def begin(self, learned: Mapping[str, Any]) -> None:
        super().begin(learned)
        calibrate(self.target, self.budget, self._calibration_seconds)

    def release(self, request: Request) -> None:
        super().release(request)
        self._feed.leave(request)
        if self._draft_corpus.outbox is not None:
            self._draft_corpus.outbox.leave(request)

    def counters(self) -> dict[str, float]:
        own = {f"corpus/{name}": value for name, value in self._draft_corpus.counters().items()}
        return super().counters() | own


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    num_draft_tokens: int = 16,
    budget: str = "learned",
    min_probability: float = 0.02,
    calibration_seconds: float = 1.0,
    corpus_bytes: int = 256 << 20,
    corpus_path: str | None = None,
    external_corpora: Mapping[str, str] | None = None,
    max_external_bytes: int = 1 << 30,
    max_external_tokens: int = 1 << 24,
) -> NgramWorker:
    """A worker with a corpus of its own.

    Args:
        progress: told how far the weights are read.
        num_draft_tokens: most draft nodes per request and step.
        budget: ``learned``: as many as pay, none where none do. ``fixed``: as many as there are.
        min_probability: nodes less likely to be accepted are never drafted.
        calibration_seconds: for timing a few forwards as the engine starts, where no earlier run
            left its cost curve; 0: none, the curve is learned from the steps alone.
        corpus_bytes: bound on the corpus of rollouts and its index.
        corpus_path: what an earlier run saved, to begin with; default: an empty corpus.
        external_corpora: name -> JSONL file, per line a JSON string or an object with ``text``.
            Loaded in the background from the first step on; one that ``corpus_path`` holds
            under such a name makes way.
        max_external_bytes: bound on all external corpora together, loading ones included.
        max_external_tokens: likewise, tokens.

    Raises InvalidInputError, naming the option; OSError for a ``corpus_path`` that cannot be read.
    """
    # Before the model, which may take minutes to load: mistakes show at once.
    check_budget(budget)
    check_number("min_probability", min_probability, 1)
    check_number("calibration_seconds", calibration_seconds, 3600)
    check_number("num_draft_tokens", num_draft_tokens, MAX_TREE_NODES - 1, int)
    draft_corpus = NgramCorpus(
        ModelSpec.read(Path(config.model.path)).vocab_size,
        corpus_bytes=corpus_bytes,
        max_external_bytes=max_external_bytes,
        max_external_tokens=max_external_tokens,
        configured={} if external_corpora is None else external_corpora,
        corpus_path=corpus_path,
    )
    target = TargetWorker(config, progress, draft_nodes=num_draft_tokens)
    return NgramWorker(
        target,
        draft_corpus,
        num_draft_tokens=num_draft_tokens,
        calibration_seconds=calibration_seconds,
        budget=(
            FixedBudget(min_probability)
            if budget == "fixed"
            else LearnedBudget.for_target(target, SOURCES, min_probability)
        ),
    )
