"""Our corpus, as a drafter to replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafters.drafter import Drafts
from ngram_native import Corpus


class CorpusDrafter:
    def __init__(
        self,
        *,
        min_probability: float = 0.0,
        max_bytes: int = 256 << 20,
        external: Sequence[NDArray[np.int32]] = (),
    ) -> None:
        """
        Args:
            min_probability: Nodes less likely to be accepted are not drafted.
            max_bytes: Of the corpus, external documents apart.
            external: Documents of an external corpus to begin with.
        """
        self.name = f"corpus, floor {min_probability:g}" if min_probability > 0 else "corpus"
        self.corpus = Corpus(max_bytes=max_bytes)
        self._min_probability = min_probability
        if external:
            self.corpus.add_external("external", external)

    def set_weight_version(self, version: int) -> None:
        self.corpus.set_weight_version(version)

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self.corpus.open(sequence_id, group, prompt)

    def propose(self, sequence_ids_B: NDArray[np.int64], budget: int) -> Drafts:
        budgets_B = np.full(len(sequence_ids_B), budget, np.int32)
        proposal = self.corpus.propose(sequence_ids_B, budgets_B, self._min_probability)
        return Drafts(
            offsets_B1=proposal.offsets_B1,
            tokens_N=proposal.tokens_N,
            parents_N=proposal.parents_N,
            probabilities_N=proposal.probabilities_N,
            sources_N=proposal.sources_N,
        )

    def insert(
        self,
        sequence_ids_B: NDArray[np.int64],
        tokens_N: NDArray[np.int32],
        offsets_B1: NDArray[np.int64],
    ) -> None:
        self.corpus.extend(sequence_ids_B, tokens_N, offsets_B1)

    def close(self, sequence_id: int) -> None:
        self.corpus.close(sequence_id)
