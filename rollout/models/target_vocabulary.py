"""The target's embedding and head, as a draft uses them.

Legend: T query rows, R rows whose logits are computed, E hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class EmbedTokens:
    """Rank 0's message: it needs the embeddings of ``count`` tokens."""

    count: int

    def run(self, target: CausalLM, ids_T: torch.Tensor | None = None) -> torch.Tensor:
        """Embeddings [T, E]. All ranks make this call; rank 0's ``ids_T`` are embedded."""
        if ids_T is None:
            ids_T = torch.empty(self.count, dtype=torch.int64, device=target.device)
        return target.embed(target.ranks.tensor.broadcast(ids_T))


@dataclass(frozen=True, slots=True)
class ComputeLogits:
    """Rank 0's message: it needs the logits of ``count`` rows."""

    count: int

    def run(self, target: CausalLM, hidden_RE: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V]. All ranks make this call, for rank 0's ``hidden_RE``."""
        if hidden_RE is None:
            shape = self.count, target.spec.hidden_size
            hidden_RE = torch.empty(shape, dtype=target.dtype, device=target.device)
        return target.logits(target.ranks.tensor.broadcast(hidden_RE.contiguous()))


class TargetVocabulary:
    """The target's embedding and head for a draft.

    Ranks that run the same rows each have a part of both; rank 0, which alone drafts, tells the
    others when it needs theirs.
    """

    def __init__(self, target: CausalLM) -> None:
        self._target = target

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, E], a new tensor."""
        if self._target.ranks.tensor.size == 1:
            return self._target.embed(ids_T)
        message = EmbedTokens(len(ids_T))
        with self._target.ranks.telling(message):
            return message.run(self._target, ids_T)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, V]."""
        if self._target.ranks.tensor.size == 1:
            return self._target.logits(hidden_RE)
        message = ComputeLogits(len(hidden_RE))
        with self._target.ranks.telling(message):
            return message.run(self._target, hidden_RE)
