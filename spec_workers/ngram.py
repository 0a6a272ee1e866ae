"""NGRAM: drafts copied from what was rolled out before."""

from __future__ import annotations

import numpy as np

from ngram_native import Corpus
from rollout.config import EngineConfig
from rollout.errors import InvalidInputError
from rollout.types import MAX_TREE_NODES, Batch, DraftTrees, EntryResult, Request
from spec_workers.draft_tree import only_roots
from spec_workers.target import TargetWorker
from spec_workers.worker import SpecWorker


class NgramWorker(SpecWorker):
    """Proposes the corpus's best tree for each request and feeds it every committed token.

    A request's prompt enters the corpus when it is first sampled from, its output as it is
    emitted: each token once. The corpus outlives weight updates; it is told of them.
    """

    def __init__(
        self,
        target: TargetWorker,
        corpus: Corpus,
        *,
        num_draft_tokens: int,
        min_probability: float,
        fixed_rows: float,
    ) -> None:
        """See `build` for the options."""
        super().__init__(target)
        if not 0 <= num_draft_tokens < MAX_TREE_NODES:
            raise InvalidInputError(
                "spec.num_draft_tokens", num_draft_tokens, f"must be in [0, {MAX_TREE_NODES - 1}]"
            )
        if not 0 <= min_probability <= 1:
            raise InvalidInputError("spec.min_probability", min_probability, "must be in [0, 1]")
        if not fixed_rows > 0:
            raise InvalidInputError("spec.fixed_rows", fixed_rows, "must be > 0")
        self.corpus = corpus
        self._num_draft_tokens = num_draft_tokens
        self._min_probability = min_probability
        self._fixed_rows = fixed_rows
        self._open: set[int] = set()
        self._weight_version = target.weight_version

    @property
    def max_draft_tokens(self) -> int:
        return self._num_draft_tokens

    def propose(self, batch: Batch) -> DraftTrees:
        if self._weight_version != self.weight_version:
            self._weight_version = self.weight_version
            self.corpus.set_weight_version(self._weight_version)
        drafting = [b for b, entry in enumerate(batch.entries) if entry.samples]
        if not drafting:
            return only_roots(len(batch.entries))
        for b in drafting:
            self._ensure_open(batch.entries[b].request)
        ids = np.array([batch.entries[b].request.request_id for b in drafting], dtype=np.int64)
        budgets = np.array([self._budget(batch, b) for b in drafting], dtype=np.int32)
        proposal = self.corpus.propose(ids, budgets, self._floor(len(drafting)))
        counts = np.zeros(len(batch.entries) + 1, dtype=np.int64)
        counts[np.array(drafting) + 1] = np.diff(proposal.offsets_B1)
        return DraftTrees(
            offsets_B1=np.cumsum(counts),
            tokens_N=proposal.tokens_N,
            parents_N=proposal.parents_N,
            depths_N=proposal.depths_N,
            masks_N=proposal.masks_N,
            probs_N=proposal.probabilities_N,
        )

    def _floor(self, width: int) -> float:
        """The least probability of acceptance at which a node pays in a step of so many requests.

        Without drafts the step emits ``width`` tokens in the time of ``width + fixed_rows`` rows. A
        node adds its probability to the one and a row to the other.
        """
        return max(self._min_probability, width / (width + self._fixed_rows))

    def _budget(self, batch: Batch, b: int) -> int:
        """Nodes worth asking for: the last token a request may emit needs no draft below it."""
        entry = batch.entries[b]
        room = self.target.room_for(entry.request) - 1
        return max(0, min(self._num_draft_tokens, len(entry.draft_slots), room))

    def _ensure_open(self, request: Request) -> None:
        if request.request_id not in self._open:
            tokens = np.array(request.tokens, dtype=np.int32)
            self.corpus.open(request.request_id, request.group, tokens)
            self._open.add(request.request_id)

    def observe(self, batch: Batch, results: list[EntryResult]) -> None:
        emitting = [
            (entry.request.request_id, result.token_ids)
            for entry, result in zip(batch.entries, results, strict=True)
            if result.token_ids
        ]
        if not emitting:
            return
        ids = np.array([request_id for request_id, _ in emitting], dtype=np.int64)
        lengths = [len(token_ids) for _, token_ids in emitting]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.array([t for _, token_ids in emitting for t in token_ids], dtype=np.int32)
        self.corpus.extend(ids, tokens, offsets)

    def release(self, request: Request) -> None:
        if request.request_id in self._open:
            self._open.remove(request.request_id)
            self.corpus.close(request.request_id)

    def counters(self) -> dict[str, float]:
        own = {f"corpus/{name}": value for name, value in self.corpus.counters().items()}
        return super().counters() | own


def build(
    config: EngineConfig,
    *,
    num_draft_tokens: int = 16,
    min_probability: float = 0.08,
    fixed_rows: float = 12.0,
    corpus_bytes: int = 256 << 20,
) -> NgramWorker:
    """A worker with an empty corpus.

    Args:
        num_draft_tokens: most draft nodes per request and step.
        min_probability: nodes less likely to be accepted are never drafted.
        fixed_rows: what a step costs beside its rows (reading the weights), as so many rows. The
            more requests share it, the likelier a node must be to pay for its row.
        corpus_bytes: bound on the corpus and its index.
    """
    try:
        corpus = Corpus(max_bytes=corpus_bytes)
    except (TypeError, ValueError) as error:
        raise InvalidInputError("spec.corpus_bytes", corpus_bytes, str(error)) from error
    return NgramWorker(
        TargetWorker(config),
        corpus,
        num_draft_tokens=num_draft_tokens,
        min_probability=min_probability,
        fixed_rows=fixed_rows,
    )
