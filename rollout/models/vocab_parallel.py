"""Embedding and head, whole or split over tensor-parallel ranks.

Legend: T query rows, R sampled rows, E hidden, V vocabulary, W a rank's part of it, N ranks.
"""

from __future__ import annotations

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.shard import shard_of
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader, with_alias
from rollout.models.spec import ModelSpec
from rollout.parallel.partition import even_parts


class VocabParallel:
    """Embedding and head; each rank has the rows of some tokens, of both tables or of the tied one.

    Every rank gets whole embeddings and whole rows of logits, bitwise the same.
    """

    def __init__(self, spec: ModelSpec, weights: WeightFactory) -> None:
        """Raises InvalidInputError for more ranks than tokens."""
        self._group = group = weights.ranks.tensor
        self._parts = even_parts(spec.vocab_size, group.size)
        if not self._parts[-1]:
            raise InvalidInputError(
                "parallel.size", group.size, f"is too many for {spec.vocab_size} tokens"
            )
        self._part = self._parts[group.rank]
        width = len(self._part)
        self.embedding_WE = weights.tensor(width, spec.hidden_size)
        self._is_tied = spec.tied_embeddings
        table_OI = self.embedding_WE if spec.tied_embeddings else None
        self.head = weights.linear(spec.hidden_size, width, table_OI=table_OI)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, E], a new tensor."""
        if self._group.size == 1:
            return self.embedding_WE[ids_T]
        rows_T = ids_T - self._part.start
        is_other_T = (rows_T < 0) | (rows_T >= len(self._part))
        own_TE = self.embedding_WE[rows_T.masked_fill(is_other_T, 0)]
        return self._group.sum_disjoint(own_TE.masked_fill_(is_other_T[:, None], 0))

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, V]."""
        return self._group.all_gather_columns(self.head(hidden_RE), self._parts)

    def weight_loaders(self, embedding: str, head: str) -> dict[str, WeightLoader]:
        """Loaders under these two names; a tied table has both."""
        rows = shard_of(self.head.weight_rows(0, len(self._part)), self._group, self._parts)
        if self._is_tied:
            remedy = "set tie_word_embeddings to false or send one of them"
            return with_alias(embedding, head, rows, remedy)
        own = WeightLoader.of(self.embedding_WE)
        return {embedding: shard_of(own, self._group, self._parts), head: rows}
