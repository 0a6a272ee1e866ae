"""transformers' prompt lookup: what followed the last 3, 2 or 1 tokens earlier in the sequence."""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from drafters.drafter import Drafts


class PromptLookupDrafter:
    def __init__(self, *, max_ngram: int = 3) -> None:
        self.name = "prompt lookup"
        self._generator = PromptLookupCandidateGenerator(
            max_matching_ngram_size=max_ngram, max_length=sys.maxsize
        )
        self._contexts: dict[int, torch.Tensor] = {}  # int64, with room at the end
        self._lengths: dict[int, int] = {}

    def set_weight_version(self, version: int) -> None:
        """It keeps nothing from one sequence to the next."""

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self._contexts[sequence_id] = torch.empty(1024, dtype=torch.int64)
        self._lengths[sequence_id] = 0
        self._append(sequence_id, prompt)

    def propose(self, sequence_ids_B: NDArray[np.int64], budget: int) -> Drafts:
        self._generator.num_output_tokens = budget
        offsets = [0]
        tokens: list[int] = []
        parents: list[int] = []
        for sequence_id in sequence_ids_B.tolist():
            length = self._lengths[sequence_id]
            context = self._contexts[sequence_id][None, :length]
            drafted = self._generator.get_candidates(context)[0][0, length:]
            tokens += drafted.tolist()
            parents += range(len(drafted))
            offsets.append(len(tokens))
        return Drafts(
            offsets_B1=np.array(offsets, np.int64),
            tokens_N=np.array(tokens, np.int32),
            parents_N=np.array(parents, np.int32),
        )

    def insert(
        self,
        sequence_ids_B: NDArray[np.int64],
        tokens_N: NDArray[np.int32],
        offsets_B1: NDArray[np.int64],
    ) -> None:
        ends = offsets_B1.tolist()
        for b, sequence_id in enumerate(sequence_ids_B.tolist()):
            self._append(sequence_id, tokens_N[ends[b] : ends[b + 1]])

    def close(self, sequence_id: int) -> None:
        del self._contexts[sequence_id], self._lengths[sequence_id]

    def _append(self, sequence_id: int, tokens: NDArray[np.int32]) -> None:
        context, begin = self._contexts[sequence_id], self._lengths[sequence_id]
        end = begin + len(tokens)
        if end > len(context):
            context = torch.cat([context, torch.empty(end, dtype=torch.int64)])
            self._contexts[sequence_id] = context
        context[begin:end] = torch.from_numpy(tokens)
        self._lengths[sequence_id] = end
