"""The draft's vocabulary: the tokens of the target's that its training text uses most.

Legend: D draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from spec_workers.draft_training.sequences import TokenSequence


class DraftVocabulary:
    """Maps between the target's token ids and the draft's, which ascend with them."""

    def __init__(self, token_ids_D: torch.Tensor, vocab_size: int) -> None:
        """``token_ids_D``: int64, ascending."""
        self.token_ids_D = token_ids_D
        self.contains_V = torch.zeros(vocab_size, dtype=torch.bool)
        self.contains_V[token_ids_D] = True

    @classmethod
    def most_frequent(
        cls, sequences: Iterable[TokenSequence], size: int, vocab_size: int
    ) -> DraftVocabulary:
        """Counted in continuations; where fewer than ``size`` tokens occur there, prompts fill up,
        then the lowest ids."""
        counts_V = torch.zeros(vocab_size, dtype=torch.float64)
        for sequence in sequences:
            begin = sequence.first_root + 1
            continuation, prompt = sequence.token_ids_L[begin:], sequence.token_ids_L[:begin]
            counts_V += torch.bincount(continuation, minlength=vocab_size)
            counts_V += torch.bincount(prompt, minlength=vocab_size) * _PROMPT_COUNT
        best_D = counts_V.sort(descending=True, stable=True).indices[: min(size, vocab_size)]
        return cls(best_D.sort().values, vocab_size)

    @property
    def offsets_D(self) -> torch.Tensor:
        """``d2t`` as published: int64, the target's id less the draft's."""
        return self.token_ids_D - torch.arange(len(self.token_ids_D))

    def coverage(self, sequences: Iterable[TokenSequence]) -> float:
        """The share of continuations' tokens that the draft can name."""
        known = total = 0
        for sequence in sequences:
            continuation = sequence.token_ids_L[sequence.first_root + 1 :]
            known += int(self.contains_V[continuation].sum())
            total += len(continuation)
        return known / max(total, 1)


_PROMPT_COUNT = 1e-6  # less than one occurrence in a continuation, however long the prompts are
