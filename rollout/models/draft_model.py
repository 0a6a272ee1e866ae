"""The base class of neural drafts' networks.

Legend: T query rows, R rows whose logits are computed, E the draft's hidden size, F columns of the
target's features, D draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from dataclasses import dataclass, replace

import torch

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.causal_lm import CausalLM
from rollout.models.forward_context import StepAttention
from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.own_weights import OwnWeights
from rollout.models.spec import ModelSpec
from rollout.models.target_vocabulary import TargetVocabulary


class DraftFamily(enum.StrEnum):
    """The families of draft networks."""

    EAGLE = "eagle"  # EAGLE and EAGLE-2, which differ only in the tree
    EAGLE3 = "eagle3"
    MTP = "mtp"
    DFLASH = "dflash"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """The properties of a draft that are known before its weights are read."""

    family: DraftFamily
    decoder: ModelSpec  # of its decoder layers in one step, with the target's vocabulary
    draft_vocab_size: int  # D
    features: AuxHiddenStates  # hidden states of the target that it reads
    target_hidden_size: int
    num_steps: int = 1  # networks of a chain, each with its own weights
    block_size: int = 1  # tokens of a block, the last known one included; 1: drafts token by token
    mask_token_id: int = 0  # the token that stands for those to be guessed in a block

    @property
    def hidden_size(self) -> int:
        """The size E of the draft's hidden states."""
        return self.decoder.hidden_size

    def nodes_per_tree(self, num_steps: int, topk: int) -> int:
        """The most rows that are run below the known tokens, for one tree."""
        return topk * (num_steps - 1) if self.block_size == 1 else 1 + num_steps

    @property
    def feature_size(self) -> int:
        """F: columns of the target's features."""
        return self.features.count * self.target_hidden_size


class DraftModel(OwnWeights):
    """The network of one draft step over flat rows. Call it under torch.inference_mode.

    A row joins the hidden state of a position with the token of the next position, and predicts the
    token after that. An embedding or head of the target is shared by reference, so an update of the
    target reaches the draft. Weights are uninitialised until written through ``weight_loaders``.
    """

    token_ids_D: torch.Tensor | None = None
    """int64, ascending, on the device: the target's token of each draft token; None if the draft
    has the target's vocabulary."""
    head: Linear | None = None
    """None: the target's."""
    stored_ids_D: torch.Tensor | None = None
    """int64: the target's token of each draft token in the checkpoint's order; None: the same."""
    _order_D: torch.Tensor | None = None  # stored row i is the checkpoint's row order[i]

    def __init__(self, spec: DraftSpec, target: CausalLM, weights: WeightFactory) -> None:
        self.spec = spec
        self.dtype = weights.dtype
        self.device = weights.device
        self._vocabulary = TargetVocabulary(target)

    def name_tokens(self, stored_ids_D: torch.Tensor | None) -> None:
        """Give the draft a vocabulary of its own, stored in ascending order.

        ``stored_ids_D``: int64, the target's token of each draft token in the checkpoint's order;
        None: the draft has the target's vocabulary.
        """
        self.stored_ids_D = stored_ids_D
        if stored_ids_D is not None:
            ascending = stored_ids_D.sort()
            self.token_ids_D = ascending.values.to(self.device)
            if not torch.equal(ascending.values, stored_ids_D):
                self._order_D = ascending.indices

    @property
    def reorders_head(self) -> bool:
        """Whether the checkpoint's rows of the head are in another order than ``token_ids_D``."""
        return self._order_D is not None

    def _head_loader(self) -> dict[str, WeightLoader]:
        """The loader of the draft's own head, in the checkpoint's order of rows."""
        if self.head is None:
            return {}
        head = self.head.weight_rows(0, self.spec.draft_vocab_size)
        return {
            "draft.lm_head.weight": head if self._order_D is None else head.reordered(self._order_D)
        }

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """The hidden states [T, E] that the first step reads, from the target's features."""
        return features_TF

    @abstractmethod
    def forward(
        self,
        input_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] for ``logits`` and for the next step. T may be zero.

        Args:
            input_ids_T: tokens of the target's vocabulary.
            positions_T: of the hidden states.
            rows_R: give the hidden states of these rows alone, [R, E]; of the others only keys and
                values are computed.
        """
        ...

    def embedded(self, table_VE: torch.Tensor | None, ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, E] by the draft's own table; by the target's if it has none."""
        return self._vocabulary.embed(ids_T) if table_VE is None else table_VE[ids_T]

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, D] in the draft's dtype, from hidden states of ``forward``."""
        return self._vocabulary.logits(hidden_RE) if self.head is None else self.head(hidden_RE)

    @abstractmethod
    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders of the draft's own tensors, by names that only a target with this draft has.

        Tensors shared with the target are not included: the target writes, reads, releases and
        counts them.
        """
        ...


def draft_weights(target: CausalLM) -> WeightFactory:
    """Makes a draft's own weights, stored as the target's are."""
    return replace(target.weight_factory, ranks=target.ranks.of_drafts)


def selected(rows_TE: torch.Tensor, rows_R: torch.Tensor | None) -> torch.Tensor:
    """The rows at ``rows_R``; all where it is None."""
    return rows_TE if rows_R is None else rows_TE[rows_R]
