"""The protocol of a trainable draft, whatever its family.

Legend: T rows of all sequences, S those that guess, L tokens of one sequence, M = L - 2 rows of it,
R rows of a level, F feature columns, E hidden, D draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.draft_training.decoder_layer import KeysValues
from spec_workers.draft_training.packed_rows import PackedRows
from spec_workers.draft_training.target_tensors import DraftVocabulary

Embed = Callable[[torch.Tensor], torch.Tensor]
"""The target's embedding: token ids [R] to [R, E]. It is the target's, and is not trained."""

Chain = list[KeysValues]
"""What a row's ancestors below its root left for it to attend to, nearest the root first."""


class TrainableDraft(nn.Module):
    """Parameters in float32, named as the checkpoint names them."""

    features: AuxHiddenStates  # what it reads of the target
    vocabulary: DraftVocabulary
    max_steps: int | None  # how far it can be unrolled; None: as far as one likes
    stored_prefix: str  # of every parameter's name in a folder; sent to an engine it is "draft."
    embed: Embed
    lm_head: nn.Linear  # of the draft's vocabulary

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """config.json of a folder that holds it."""

    def tables(self) -> dict[str, torch.Tensor]:
        """The tensors that a folder holds beside the parameters, by name."""
        return {"d2t": self.vocabulary.offsets_D}

    @abstractmethod
    def unroll(self, rows: PackedRows, num_steps: int) -> list[torch.Tensor]:
        """Hidden states [S, E] for ``logits``, per step, as if each guess had been right so far."""

    @abstractmethod
    def head_input(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E]: what ``lm_head`` reads."""

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, D]."""
        return self.lm_head(self.head_input(hidden_RE))

    @abstractmethod
    def read(
        self, tokens_M: torch.Tensor, features_MF: torch.Tensor, positions_M: torch.Tensor
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Extend by a sequence: its rows' hidden states [M, E], of a tree's first level, and what
        ``deepen`` needs. ``tokens_M``: row i's is the token that follows features i."""

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
        """Nodes of a tree that grows from row ``rows_R[r]``: one level deeper, from 1 on.

        Args:
            memory: what ``read`` gave.
            positions_R: of the rows.
            tokens_R: the nodes' tokens.
            hidden_RE: their parents' hidden states.
            chain: what their parents returned, [R, ...] each.

        Returns their hidden states, and the chain for their children.
        """
