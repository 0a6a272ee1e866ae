"""The proposer that vLLM makes for ``speculative_config={"method": "custom_class", ...}``.

Legend: B rows of a call, R and L the rows and columns of vLLM's arrays.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngram_native import MAX_BUDGET
from rollout.engine.corpus_documents import documents_from
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState, Publishing
from rollout.engine.tokenizer import PromptEncoder, prompt_group
from rollout.errors import InvalidInputError
from rollout.validation import checked_int, checked_path
from spec_workers.budget import BudgetKind
from spec_workers.corpus.ngram_corpus import NgramCorpus
from spec_workers.vllm.chain_budget import ChainBudget, ChainStep, FixedChains, LearnedChains
from spec_workers.vllm.chains import NOTHING_JUDGED, ProposedChains, best_chains
from spec_workers.vllm.options import FIELD, ProposerOptions, checked_num_tokens
from spec_workers.vllm.rows import RecognisedRows, RequestRows

_AWAY = 2
"""Requests remembered that are in no row, as a multiple of vLLM's rows: vLLM does not say which of
them have ended and which were preempted."""

_NODES = 4
"""Nodes of a tree that the corpus grows for each token of the chain that is taken of it."""


class NgramProposer:
    """Drafts from the n-gram corpus inside vLLM.

    vLLM calls `propose` after each step, between two forwards, and `load_model` once. All other
    methods are for callers that hold the object: see `CorpusWorkerExtension`. Sampling is vLLM's
    alone: its rejection sampler keeps the distribution, and its kernels decide the bits.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises InvalidInputError, naming the option."""
        options = ProposerOptions.of(vllm_config)
        self._num_tokens = checked_num_tokens(vllm_config)
        model, self._max_rows = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
        self._max_len: int = model.max_model_len
        self._vocab_size: int = model.get_vocab_size()
        self._tokenizer: str = model.tokenizer
        self._encoder: PromptEncoder | None = None  # made where texts are to be encoded
        self._corpus = NgramCorpus(self._vocab_size, options)
        max_away = min(_AWAY * self._max_rows, self._corpus.feed.max_followed - self._max_rows)
        if max_away < 0:
            raise InvalidInputError(
                f"{FIELD}.corpus_bytes", options.corpus_bytes,
                f"has room for {self._corpus.feed.max_followed} requests at once, and vLLM runs "
                f"max_num_seqs={self._max_rows}; raise it",
            )  # fmt: skip
        self._rows = RequestRows(self._max_rows, self._max_len, max_away)
        self._budget: ChainBudget = FixedChains(options.min_probability)
        if options.budget == BudgetKind.LEARNED:
            self._budget = LearnedChains(
                self._num_tokens, self._max_rows, self._max_len, _row_buckets(vllm_config),
                options.min_probability,
            )  # fmt: skip
        self._proposed = ProposedChains(0, self._num_tokens)
        self._ended = math.nan  # when the latest call returned
        self._drafting_ms = 0.0
        self._totals = {"steps": 0, "rows": 0, "drafted": 0, "accepted": 0, "propose_seconds": 0.0}
        for name, path in self._corpus.configured.items():
            self.add_external_corpus(name, file_path=path)

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Nothing: the corpus is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A chain of draft tokens for each row, maybe none.

        Args:
            sampled_token_ids: tokens of each row that the step sampled; none of one in prefill.
            num_tokens_no_spec: tokens of each row, those included: [R].
            token_ids_cpu: the tokens of each row: [R, L].
            slot_mappings: unused.
        """
        started = time.perf_counter()
        size = len(sampled_token_ids)
        counts_B = np.fromiter(map(len, sampled_token_ids), dtype=np.int64, count=size)
        lengths_B = num_tokens_no_spec[:size].astype(np.int64)
        rows = self._rows.update(counts_B, lengths_B, token_ids_cpu)
        self._corpus.publish()
        self._observe(rows, counts_B, lengths_B, token_ids_cpu, (started - self._ended) * 1e3)
        self._feed(rows, token_ids_cpu)
        self._proposed = ProposedChains(size, self._num_tokens)
        drafts = self._draft(rows, counts_B, lengths_B)
        self._ended = time.perf_counter()
        self._drafting_ms = (self._ended - started) * 1e3
        self._totals["propose_seconds"] += self._ended - started
        return drafts

    def set_weight_version(self, version: int) -> None:
        """Declare that tokens from now on come from another policy; older ones count for less."""
        self._corpus.corpus.set_weight_version(checked_int(version, "version"))
        self._budget.change_policy()

    def add_external_corpus(
        self,
        name: str,
        *,
        documents: Sequence[str] | None = None,
        token_chunks: Sequence[Sequence[int]] | None = None,
        file_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Load a corpus to draft from in the background, from exactly one source; see
        `rollout.engine.corpora.Corpora.add_external_corpus`. Raises InvalidInputError."""
        if any(
            each.name == name and each.state is not ExternalState.FAILED
            for each in self._corpus.external_corpora()
        ):
            raise InvalidInputError("name", name, "is taken: remove that corpus, or choose another")
        source = documents_from(
            self._prompt_encoder(), documents=documents, token_chunks=token_chunks,
            file_path=file_path,
        )  # fmt: skip
        self._corpus.add_external(name, source, source.fraction_read, Publishing.WHEN_READY)

    def remove_external_corpus(self, name: str) -> None:
        """Forget an external corpus, or cancel its load. Raises InvalidInputError if unknown."""
        self._corpus.remove_external(name)

    def external_corpora(self) -> list[ExternalCorpus]:
        """All external corpora by name, those that are loading included."""
        self._corpus.publish()
        return self._corpus.external_corpora()

    def save_corpus(self, path: str | os.PathLike[str]) -> None:
        """Write the corpus to a file, whole or not at all. Raises OSError."""
        self._corpus.save(checked_path(path, "path"))

    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        """Replace the contents by a saved file's. Raises InvalidInputError or OSError; nothing
        changed then."""
        self._corpus.load(checked_path(path, "path"))

    def counters(self) -> dict[str, float]:
        """Gauges and running totals by name.

        ``accepted / rows + 1`` is the accept length: tokens for each row and step, those that came
        with a request's end and were dropped included.
        """
        named = {f"corpus/{name}": value for name, value in self._corpus.counters().items()}
        named |= {f"budget/{name}": value for name, value in self._budget.counters().items()}
        return named | self._totals

    def check_integrity(self) -> None:
        """Raise IntegrityError if the corpus's data structures contradict each other."""
        self._corpus.check_integrity()

    def close(self) -> None:
        """Cancel what loads."""
        self._corpus.close()

    def _observe(
        self,
        rows: RecognisedRows,
        counts_B: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        token_ids_RL: NDArray[np.int32],
        milliseconds: float,
    ) -> None:
        """Tell the budget what came of the latest call's chains."""
        size = min(counts_B.size, self._proposed.sizes_B.size)
        decoded_B = rows.stayed_B[:size] & (counts_B[:size] > 0)
        width = int(decoded_B.sum())
        if not width:
            return
        drafted = int(self._proposed.sizes_B[:size][decoded_B].sum())
        judged, accepted = NOTHING_JUDGED, 0
        if drafted:
            positions_BK = rows.known_B[:size, None] + np.arange(self._num_tokens)
            positions_BK = np.minimum(positions_BK, token_ids_RL.shape[1] - 1)
            sampled_BK = token_ids_RL[np.arange(size)[:, None], positions_BK]
            judged, accepted = self._proposed.judge(sampled_BK, counts_B[:size], decoded_B)
        step = ChainStep(
            width=width,
            num_drafted=drafted,
            longest=int(lengths_B[:size][decoded_B].max()),
            num_accepted=accepted,
            milliseconds=milliseconds if width == counts_B.size else math.nan,
            drafting_ms=self._drafting_ms,
            judged=judged,
        )
        self._budget.observe(step)
        self._totals["steps"] += 1
        self._totals["rows"] += width
        self._totals["drafted"] += drafted
        self._totals["accepted"] += accepted

    def _feed(self, rows: RecognisedRows, token_ids_RL: NDArray[np.int32]) -> None:
        """Tell the corpus each token once."""
        corpus = self._corpus.corpus
        for request in rows.forgotten:
            corpus.close(request)
        for row in np.flatnonzero(rows.is_new_B).tolist():
            prompt = self._known_tokens(token_ids_RL[row, : rows.known_B[row]])
            corpus.open(int(rows.ids_B[row]), prompt_group(prompt.tolist()), prompt)
        verified_B = np.zeros(rows.ids_B.size, dtype=np.int32)
        size = min(verified_B.size, self._proposed.sizes_B.size)
        verified_B[:size] = np.where(rows.stayed_B[:size], self._proposed.verified_B[:size], 0)
        tokens_N = self._known_tokens(rows.tokens_N)
        corpus.extend(rows.ids_B, tokens_N, rows.offsets_B1, verified_B)

    def _draft(
        self, rows: RecognisedRows, counts_B: NDArray[np.int64], lengths_B: NDArray[np.int64]
    ) -> list[list[int]]:
        nothing: list[list[int]] = [[] for _ in range(counts_B.size)]
        # The last token of a full context is never followed, nor drafted for.
        limits_B = np.minimum(self._num_tokens, self._max_len - 1 - lengths_B)
        drafting_B = np.flatnonzero((counts_B > 0) & (limits_B > 0))
        if not drafting_B.size:
            return nothing
        floor = self._budget.floor(drafting_B.size, int(lengths_B.max()))
        if floor is None:
            return nothing
        limits_B = limits_B[drafting_B]
        sizes_B = np.minimum(_NODES * limits_B, MAX_BUDGET).astype(np.int32)
        proposal = self._corpus.corpus.propose(rows.ids_B[drafting_B], sizes_B, floor)
        chains = best_chains(proposal, limits_B)
        kept_B = self._budget.choose(chains.probs_N, chains.depths_N, chains.offsets_B1)
        return self._proposed.put(drafting_B, chains, kept_B)

    def _known_tokens(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The tokens with those outside of the vocabulary, as of images, replaced by ones in it."""
        return np.minimum(np.maximum(tokens, 0), self._vocab_size - 1)  # np.clip is slow

    def _prompt_encoder(self) -> PromptEncoder:
        if self._encoder is None:
            if Path(self._tokenizer).is_dir():
                self._encoder = PromptEncoder.from_pretrained(self._tokenizer, self._vocab_size)
            else:
                from transformers import AutoTokenizer  # slow to import

                tokenizer = AutoTokenizer.from_pretrained(self._tokenizer)
                self._encoder = PromptEncoder(tokenizer, self._vocab_size)
        return self._encoder


def _row_buckets(vllm_config: Any) -> list[int]:
    """The numbers of rows for which vLLM captured graphs, ascending; none where it runs eagerly."""
    if vllm_config.model_config.enforce_eager:
        return []
    return sorted(vllm_config.compilation_config.cudagraph_capture_sizes or [])
