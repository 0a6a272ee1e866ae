"""arctic-inference's suffix decoding, where its package can be imported: a suffix tree per sequence
and one of all responses, of which the better draft is taken.

The rest of the package asks for CUDA and vLLM, this part does not: `csrc/suffix_decoding` of its
source distribution builds alone, with cmake and nanobind, and the module it gives belongs in
`arctic_inference/suffix_decoding`.
"""

from __future__ import annotations

import numpy as np
from arctic_inference.suffix_decoding import (  # type: ignore[import-not-found]
    SuffixDecodingCache,
)
from numpy.typing import NDArray

from drafters.drafter import Drafts


class SuffixDecodingDrafter:
    def __init__(self, *, tree: bool = True, factor: float = 4.0, min_probability: float = 0.02):
        """
        Args:
            tree: Draft trees; chains otherwise.
            factor: Nodes drafted per token of matched context, at most.
            min_probability: Nodes it holds less likely are not drafted.
        """
        self.name = "arctic, tree" if tree else "arctic, chain"
        self._cache = SuffixDecodingCache()
        self._settings = {
            "use_tree_spec": tree,
            "max_spec_factor": factor,
            "min_token_prob": min_probability,
        }
        self._contexts: dict[int, NDArray[np.int32]] = {}  # the end of each sequence

    def set_weight_version(self, version: int) -> None:
        """It knows none."""

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self._cache.start_request(sequence_id, prompt)
        self._contexts[sequence_id] = prompt[-self._cache.max_tree_depth :]

    def propose(self, sequence_ids_B: NDArray[np.int64], budget: int) -> Drafts:
        offsets, tokens, parents, probabilities = [0], [], [], []
        for sequence_id in sequence_ids_B.tolist():
            draft = self._cache.speculate(
                sequence_id, self._contexts[sequence_id], max_spec_tokens=budget, **self._settings
            )
            tokens += draft.token_ids
            parents += [parent + 1 for parent in draft.parents]
            probabilities += draft.probs
            offsets.append(len(tokens))
        return Drafts(
            offsets_B1=np.array(offsets, np.int64),
            tokens_N=np.array(tokens, np.int32),
            parents_N=np.array(parents, np.int32),
            probabilities_N=np.array(probabilities, np.float32),
        )

    def insert(
        self,
        sequence_ids_B: NDArray[np.int64],
        tokens_N: NDArray[np.int32],
        offsets_B1: NDArray[np.int64],
    ) -> None:
        ends = offsets_B1.tolist()
        for b, sequence_id in enumerate(sequence_ids_B.tolist()):
            tokens = tokens_N[ends[b] : ends[b + 1]]
            self._cache.add_active_response(sequence_id, tokens)
            context = np.concatenate([self._contexts[sequence_id], tokens])
            self._contexts[sequence_id] = context[-self._cache.max_tree_depth :]

    def close(self, sequence_id: int) -> None:
        self._cache.stop_request(sequence_id)
        del self._contexts[sequence_id]
