"""The protocol of a neural draft's network.

Legend: T query rows, R rows whose logits are computed, E the draft's hidden size, F columns of the
target's features, D draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.causal_lm import CausalLM
from rollout.models.forward_context import LayerAttention
from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec, read_json

CHAIN_ARCHITECTURE = "SpecrolloutMTP"
"""The architecture in config.json of a folder that holds only an MTP chain."""


class DraftFamily(enum.StrEnum):
    """The families of draft networks."""

    EAGLE = "eagle"  # EAGLE and EAGLE-2, which differ only in the tree
    EAGLE3 = "eagle3"
    MTP = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """The properties of a draft that are known before its weights are read."""

    family: DraftFamily
    decoder: ModelSpec  # of its decoder layers, with the target's vocabulary
    draft_vocab_size: int  # D
    features: AuxHiddenStates  # hidden states of the target that it reads
    target_hidden_size: int
    num_steps: int = 1  # networks of a chain, each with its own weights

    @property
    def hidden_size(self) -> int:
        """The size E of the draft's hidden states."""
        return self.decoder.hidden_size

    @property
    def num_layers(self) -> int:
        """Attention layers of one step, each with keys and values in the step's KV pool."""
        return self.decoder.num_layers

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.decoder.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.decoder.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.decoder.head_dim

    @property
    def feature_size(self) -> int:
        """F: columns of the target's features."""
        return self.features.count * self.target_hidden_size


class DraftModel(Protocol):
    """The network of one draft step over flat rows. Call it under torch.inference_mode.

    A row joins the hidden state of a position with the token of the next position, and predicts the
    token after that. An embedding or head of the target is shared by reference, so an update of the
    target reaches the draft.
    """

    spec: DraftSpec
    dtype: torch.dtype
    device: torch.device
    token_ids_D: torch.Tensor | None
    """int64, ascending, on the device: the target's token of each draft token; None if the draft
    has the target's vocabulary."""

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """The hidden states [T, E] that the first step reads, from the target's features."""
        ...

    def forward(
        self,
        input_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        attention: LayerAttention,
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

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, D] in the draft's dtype, from hidden states of ``forward``."""
        ...

    def linears(self) -> list[Linear]:
        """The draft's own matrix products."""
        ...

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders of the draft's own tensors, by names that only a target with this draft has.

        Tensors shared with the target are not included: the target writes, reads, releases and
        counts them.
        """
        ...

    def finish_loading(self) -> None:
        """Call after the last write of a load or update."""
        ...

    def release(self) -> int:
        """Free the memory of the draft's own weights. Returns the bytes."""
        ...

    def allocate(self) -> None:
        """Allocate the draft's own weights again, undefined until written."""
        ...


def is_separate_chain(folder: Path) -> bool:
    """Whether a draft's folder holds an MTP chain. Raises CheckpointError without a config.json."""
    config = read_json(folder / "config.json", "a draft's folder")
    return config.get("architectures") == [CHAIN_ARCHITECTURE]


def draft_weights(target: CausalLM, packing: bool) -> WeightFactory:
    """Makes a draft's own weights: in the target's dtype, and on its device."""
    return WeightFactory(
        dtype=target.dtype, device=target.device, packing=packing, ranks=target.ranks.of_drafts
    )


def selected(rows_TE: torch.Tensor, rows_R: torch.Tensor | None) -> torch.Tensor:
    """The rows at ``rows_R``; all where it is None."""
    return rows_TE if rows_R is None else rows_TE[rows_R]


def embedded(
    embedding_VE: torch.Tensor | None, target: CausalLM, input_ids_T: torch.Tensor
) -> torch.Tensor:
    """Embeddings [T, E] by a draft's own table, or by the target's if the draft has none."""
    return target.embed(input_ids_T) if embedding_VE is None else embedding_VE[input_ids_T]
