"""Drafters of other projects behind the protocol of `replaying.Drafter`, where they are installed.

arctic-inference as a whole asks for CUDA and vLLM. `csrc/suffix_decoding` of its source
distribution builds alone, with cmake and nanobind; it belongs into
`arctic_inference/suffix_decoding`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from replaying import Drafter, Drafts

_BEST = {"use_tree_spec": True, "max_spec_factor": 4.0, "min_token_prob": 0.02}
"""The settings that suit suffix decoding best."""


class SuffixDecodingDrafter:
    """arctic-inference's suffix decoding: a suffix tree per sequence and one of all responses, of
    which the better draft is taken."""

    name = "arctic, tree"

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import (  # type: ignore[import-not-found]
            SuffixDecodingCache,
        )

        self._cache = SuffixDecodingCache()
        self._contexts: dict[int, NDArray[np.int32]] = {}  # the end of each sequence

    def set_weight_version(self, version: int) -> None:
        """Does nothing: suffix decoding knows no weight versions."""

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self._cache.start_request(sequence_id, prompt)
        self._contexts[sequence_id] = prompt[-self._cache.max_tree_depth :]

    def propose(self, ids_B: NDArray[np.int64], budget: int) -> Drafts:
        offsets, tokens, parents = [0], list[int](), list[int]()
        for sequence_id in ids_B.tolist():
            draft = self._cache.speculate(
                sequence_id, self._contexts[sequence_id], max_spec_tokens=budget, **_BEST
            )
            tokens += draft.token_ids
            parents += [parent + 1 for parent in draft.parents]
            offsets.append(len(tokens))
        return Drafts(
            offsets_B1=np.array(offsets, np.int64),
            tokens_N=np.array(tokens, np.int32),
            parents_N=np.array(parents, np.int32),
        )

    def insert(
        self, ids_B: NDArray[np.int64], tokens_N: NDArray[np.int32], offsets_B1: NDArray[np.int64]
    ) -> None:
        ends = offsets_B1.tolist()
        for b, sequence_id in enumerate(ids_B.tolist()):
            tokens = tokens_N[ends[b] : ends[b + 1]]
            self._cache.add_active_response(sequence_id, tokens)
            context = np.concatenate([self._contexts[sequence_id], tokens])
            self._contexts[sequence_id] = context[-self._cache.max_tree_depth :]

    def close(self, sequence_id: int) -> None:
        self._cache.stop_request(sequence_id)
        del self._contexts[sequence_id]


class PromptLookupDrafter:
    """transformers' prompt lookup: what followed the last 3, 2 or 1 tokens earlier in the
    sequence."""

    name = "prompt lookup"

    def __init__(self) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self._generator = PromptLookupCandidateGenerator(
            max_matching_ngram_size=3, max_length=sys.maxsize
        )
        self._contexts: dict[int, torch.Tensor] = {}  # int64

    def set_weight_version(self, version: int) -> None:
        """Does nothing: prompt lookup keeps nothing from one sequence to the next."""

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self._contexts[sequence_id] = torch.from_numpy(prompt.astype(np.int64))

    def propose(self, ids_B: NDArray[np.int64], budget: int) -> Drafts:
        self._generator.num_output_tokens = budget
        offsets, tokens, parents = [0], list[int](), list[int]()
        for sequence_id in ids_B.tolist():
            context = self._contexts[sequence_id]
            drafted = self._generator.get_candidates(context[None])[0][0, len(context) :]
            tokens += drafted.tolist()
            parents += range(len(drafted))
            offsets.append(len(tokens))
        return Drafts(
            offsets_B1=np.array(offsets, np.int64),
            tokens_N=np.array(tokens, np.int32),
            parents_N=np.array(parents, np.int32),
        )

    def insert(
        self, ids_B: NDArray[np.int64], tokens_N: NDArray[np.int32], offsets_B1: NDArray[np.int64]
    ) -> None:
        tokens = torch.from_numpy(tokens_N.astype(np.int64))
        ends = offsets_B1.tolist()
        for b, sequence_id in enumerate(ids_B.tolist()):
            parts = (self._contexts[sequence_id], tokens[ends[b] : ends[b + 1]])
            self._contexts[sequence_id] = torch.cat(parts)

    def close(self, sequence_id: int) -> None:
        del self._contexts[sequence_id]


PEERS: dict[str, Callable[[], Drafter]] = {
    "arctic_inference": SuffixDecodingDrafter,
    "transformers": PromptLookupDrafter,
}
"""By the package that each needs."""
