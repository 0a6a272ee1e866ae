"""The corpus as a drafter whose calls are timed one by one."""

from __future__ import annotations

import numpy as np
from drafters.corpus import CorpusDrafter
from drafters.drafter import Drafts
from numpy.typing import NDArray

from corpus_bench.timing import clock_cost, cpu_clock
from ngram_native import Corpus


class TimedDrafter(CorpusDrafter):
    """Takes turns with the given budgets, whatever it is asked for, so that each of them meets the
    same kind of queries, and none finds in the caches what another has just read."""

    def __init__(
        self, corpus: Corpus, budgets: list[int], *, cold_bytes: int = 0, first_id: int = 0
    ) -> None:
        """
        Args:
            corpus: What it begins with.
            budgets: Draft nodes per request.
            cold_bytes: Memory read before each call, so that the caches hold little of the corpus.
            first_id: Added to sequence ids and groups, which may be in use in the corpus.
        """
        super().__init__()
        self.corpus = corpus
        self._budgets = budgets
        self._first_id = first_id
        self._filler = np.ones(cold_bytes // 8)
        self._cost = clock_cost()
        self._calls = 0
        self.samples: dict[tuple[int, int], list[int]] = {}  # ns, by batch size and budget

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        super().open(sequence_id + self._first_id, group + self._first_id, prompt)

    def propose(self, sequence_ids_B: NDArray[np.int64], budget: int) -> Drafts:
        budget = self._budgets[self._calls % len(self._budgets)]
        self._calls += 1
        budgets_B = np.full(len(sequence_ids_B), budget, np.int32)
        ids_B = sequence_ids_B + self._first_id
        self._filler.sum()
        start = cpu_clock()
        proposal = self.corpus.propose(ids_B, budgets_B, 0.0)
        nanoseconds = cpu_clock() - start - self._cost
        self.samples.setdefault((len(ids_B), budget), []).append(nanoseconds)
        return Drafts(
            offsets_B1=proposal.offsets_B1,
            tokens_N=proposal.tokens_N,
            parents_N=proposal.parents_N,
        )

    def insert(
        self,
        sequence_ids_B: NDArray[np.int64],
        tokens_N: NDArray[np.int32],
        offsets_B1: NDArray[np.int64],
    ) -> None:
        super().insert(sequence_ids_B + self._first_id, tokens_N, offsets_B1)

    def close(self, sequence_id: int) -> None:
        super().close(sequence_id + self._first_id)
