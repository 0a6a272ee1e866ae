"""The base class of trainable drafts, and their vocabularies.

Legend: T rows of all sequences, S those that guess, L tokens of one sequence, M = L - 2 of its
rows, R rows of a level, F feature columns, E hidden, D draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.spec import ModelSpec
from spec_workers.draft_training.decoder_layer import KeysValues
from spec_workers.draft_training.packed_rows import PackedRows
from spec_workers.draft_training.sequences import TokenSequence

Embed = Callable[[torch.Tensor], torch.Tensor]
"""The target's embedding: token ids [R] to [R, E]. It is not trained."""

Chain = list[KeysValues]
"""Keys and values of a row's ancestors below its root, the nearest to the root first."""


_PROMPT_COUNT = 1e-6  # less than one occurrence in a continuation, however long the prompts are


class DraftVocabulary:
    """The target's tokens that a draft can name. Draft ids ascend with the target's."""

    def __init__(self, token_ids_D: torch.Tensor, vocab_size: int) -> None:
        """``token_ids_D``: int64, ascending."""
        self.token_ids_D = token_ids_D
        self.contains_V = torch.zeros(vocab_size, dtype=torch.bool)
        self.contains_V[token_ids_D] = True

    @classmethod
    def most_frequent(
        cls, sequences: Iterable[TokenSequence], size: int, vocab_size: int
    ) -> DraftVocabulary:
        """The ``size`` most frequent tokens of continuations.

        If fewer occur there, prompts' tokens follow, then the lowest ids.
        """
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
        """``d2t`` as in published drafts: int64, the target's id minus the draft's."""
        return self.token_ids_D - torch.arange(len(self.token_ids_D))

    def coverage(self, sequences: Iterable[TokenSequence]) -> float:
        """The share of the continuations' tokens that the draft can name."""
        known = total = 0
        for sequence in sequences:
            continuation = sequence.token_ids_L[sequence.first_root + 1 :]
            known += int(self.contains_V[continuation].sum())
            total += len(continuation)
        return known / max(total, 1)


class TrainableDraft(nn.Module):
    """A draft with float32 parameters that have a checkpoint's names."""

    architecture: str  # in config.json
    stored_prefix: str  # of parameters' names in a folder; an engine's update has "draft."
    max_steps: int | None  # guesses that can be unrolled; None: any number
    lm_head: nn.Linear  # over the draft's vocabulary

    def __init__(
        self,
        spec: ModelSpec,
        shared: dict[str, Any],
        features: AuxHiddenStates,
        vocabulary: DraftVocabulary,
        embed: Embed,
    ) -> None:
        """
        Args:
            spec: of a decoder layer of the draft.
            shared: further fields of its config.json.
            features: the hidden states of the target that it reads.
            vocabulary: the tokens that it can name.
            embed: the target's embedding.
        """
        super().__init__()
        self.features, self.vocabulary, self.embed = features, vocabulary, embed
        self._spec, self._shared = spec, shared

    def config(self) -> dict[str, Any]:
        """The contents of its config.json."""
        spec = self._spec
        return self._shared | {
            "architectures": [self.architecture],
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "intermediate_size": spec.ffn_size,
            "attention_bias": False,
            "mlp_bias": False,
            "draft_vocab_size": len(self.vocabulary.token_ids_D),
            "tie_word_embeddings": False,
        }

    def tables(self) -> dict[str, torch.Tensor]:
        """Tensors that a folder holds in addition to the parameters, by name."""
        return {"d2t": self.vocabulary.offsets_D}

    @abstractmethod
    def unroll(self, rows: PackedRows, num_steps: int) -> list[torch.Tensor]:
        """Hidden states [S, E] for ``logits`` of each step, assuming that earlier guesses were
        right."""

    @abstractmethod
    def head_input(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """The input of ``lm_head``, [R, E]."""

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits over the draft's vocabulary, [R, D]."""
        return self.lm_head(self.head_input(hidden_RE))

    @abstractmethod
    def read(
        self, tokens_M: torch.Tensor, features_MF: torch.Tensor, positions_M: torch.Tensor
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Run the rows of a sequence.

        Returns their hidden states [M, E], which give a tree's first level, and the memory that
        ``deepen`` needs. ``tokens_M``: for row i, the token that follows features i.
        """

    @abstractmethod
    def deepen(
        self,
        level: int,
        memory: list[KeysValues],
        rows_R: torch.Tensor,
        positions_R: torch.Tensor,
        tokens_R: torch.Tensor,
        hidden_RE: torch.Tensor,
        chain: Chain,
    ) -> tuple[torch.Tensor, Chain]:
        """Run one level of nodes, of trees that grow from rows ``rows_R``.

        Returns the nodes' hidden states, and the chain for their children.

        Args:
            level: the nodes' depth below the first level, from 1 on.
            memory: from ``read``.
            positions_R: positions of the rows.
            tokens_R: the nodes' tokens.
            hidden_RE: their parents' hidden states.
            chain: their parents' chain, [R, ...] each.
        """
