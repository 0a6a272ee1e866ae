"""NGRAM: drafts copied from what was rolled out before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rollout.config import EngineConfig
from rollout.errors import InvalidInputError
from rollout.models.loader import Progress
from rollout.models.spec import ModelSpec
from rollout.types import MAX_TREE_NODES, Batch, DraftTrees, EntryResult, Request
from spec_workers.draft_tree import only_roots
from spec_workers.ngram_corpus import NgramCorpus
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
        draft_corpus: NgramCorpus,
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
        self._draft_corpus = draft_corpus
        self.corpus = draft_corpus.corpus
        self._num_draft_tokens = num_draft_tokens
        self._min_probability = min_probability
        self._fixed_rows = fixed_rows
        self._open: set[int] = set()

    @property
    def max_draft_tokens(self) -> int:
        return self._num_draft_tokens

    @property
    def draft_corpus(self) -> NgramCorpus:
        return self._draft_corpus

    def propose(self, batch: Batch) -> DraftTrees:
        self._draft_corpus.publish()
        self.corpus.set_weight_version(self.weight_version)
        drafting = [
            b
            for b, entry in enumerate(batch.entries)
            if entry.samples and self._is_open(entry.request)
        ]
        if not drafting:
            return only_roots(len(batch.entries))
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
            sources_N=proposal.sources_N,
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

    def _is_open(self, request: Request) -> bool:
        """Opens it when the corpus has room. A request that found none is decoded plainly."""
        if request.request_id in self._open:
            return True
        if len(self._open) >= self.corpus.max_sequences:
            return False
        tokens = np.array(request.tokens, dtype=np.int32)
        self.corpus.open(request.request_id, request.group, tokens)
        self._open.add(request.request_id)
        return True

    def observe(self, batch: Batch, results: list[EntryResult]) -> None:
        emitting = [
            (entry.request.request_id, result.token_ids)
            for entry, result in zip(batch.entries, results, strict=True)
            if result.token_ids and entry.request.request_id in self._open
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
        own = {f"corpus/{name}": value for name, value in self._draft_corpus.counters().items()}
        return super().counters() | own


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    num_draft_tokens: int = 16,
    min_probability: float = 0.08,
    fixed_rows: float = 12.0,
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
        min_probability: nodes less likely to be accepted are never drafted.
        fixed_rows: what a step costs beside its rows (reading the weights), as so many rows. The
            more requests share it, the likelier a node must be to pay for its row.
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
    draft_corpus = NgramCorpus(
        ModelSpec.read(Path(config.model.path)).vocab_size,
        corpus_bytes=corpus_bytes,
        max_external_bytes=max_external_bytes,
        max_external_tokens=max_external_tokens,
        configured={} if external_corpora is None else external_corpora,
    )
    if corpus_path is not None:
        if not Path(corpus_path).is_file():
            raise InvalidInputError("spec.corpus_path", corpus_path, "there is no such file")
        draft_corpus.load(corpus_path, "spec.corpus_path")
    return NgramWorker(
        TargetWorker(config, progress),
        draft_corpus,
        num_draft_tokens=num_draft_tokens,
        min_probability=min_probability,
        fixed_rows=fixed_rows,
    )
