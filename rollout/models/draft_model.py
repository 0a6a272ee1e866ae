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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """The properties of a draft that are known before its weights are read."""

    family: DraftFamily
    decoder: ModelSpec  # of its decoder layers in one step, with the target's vocabulary
    draft_vocab_size: int  # D
    features: AuxHiddenStates  # hidden states of the target that it reads
    target_hidden_size: int
    num_steps: int = 1  # networks of a chain, each with its own weights

    @property
    def hidden_size(self) -> int:
        """The size E of the draft's hidden states."""
        return self.decoder.hidden_size

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

    def __init__(self, spec: DraftSpec, target: CausalLM, weights: WeightFactory) -> None:
        self.spec = spec
        self.dtype = weights.dtype
        self.device = weights.device
        self._vocabulary = TargetVocabulary(target)

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
