"""The protocol of a neural draft's network.

Legend: T query rows, R rows whose logits are wanted, E the draft's hidden size, F columns of the
target's features, D draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.causal_lm import LayerAttention
from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec, read_json

CHAIN_ARCHITECTURE = "SpecrolloutMTP"
"""The architecture that config.json names in a folder of an MTP chain alone."""


class DraftFamily(enum.StrEnum):
    EAGLE = "eagle"  # EAGLE and EAGLE-2: they differ in the tree, not in the network
    EAGLE3 = "eagle3"
    MTP = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """The facts of a draft that are known before any weights are read."""

    family: DraftFamily
    decoder: ModelSpec  # its decoder layers; the vocabulary is the target's
    draft_vocab_size: int  # D
    features: AuxHiddenStates  # what it reads of the target
    target_hidden_size: int
    num_steps: int = 1  # networks of the chain, each with weights of its own

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def num_layers(self) -> int:
        """Attention layers of one step, and so of one KV pool."""
        return self.decoder.num_layers

    @property
    def num_heads(self) -> int:
        return self.decoder.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.head_dim

    @property
    def feature_size(self) -> int:
        """F."""
        return self.features.count * self.target_hidden_size


class DraftModel(Protocol):
    """The network of one draft step over flat rows. Calls belong under torch.inference_mode.

    A row joins a hidden state to the token that follows what the state has read; what comes out
    predicts the token after that. Embedding and head taken from the target are read where the
    target has them, so an update of the target is one of the draft too.
    """

    spec: DraftSpec
    dtype: torch.dtype
    device: torch.device
    token_ids_D: torch.Tensor | None
    """int64, ascending, on the device: the target's token of each draft token; None where the
    draft's vocabulary is the target's."""

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """[T, E]: the hidden states a first step takes, of the target's features."""
        ...

    def forward(
        self,
        input_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        attention: LayerAttention,
    ) -> torch.Tensor:
        """Hidden states [T, E] for ``logits``, and for a next step to take; T may be zero.

        ``input_ids_T``: tokens of the target's vocabulary. ``positions_T``: of the hidden states.
        """
        ...

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, D] in the draft's dtype, of what ``forward`` gave."""
        ...

    def linears(self) -> list[Linear]:
        """Every matrix product of the draft's own."""
        ...

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Where the draft's own tensors go, by names no target has unless it brought the draft.

        What is taken from the target is not among them: it is the target's to write, read, release
        and count.
        """
        ...

    def finish_loading(self) -> None:
        """Call when the writes of a load or update are done."""
        ...

    def release(self) -> int:
        """Free the memory of the draft's own weights; the bytes freed."""
        ...

    def allocate(self) -> None:
        """Memory for them again, to be written to."""
        ...


def is_separate_chain(folder: Path) -> bool:
    """Whether a draft's folder holds an MTP chain. Raises CheckpointError without a config.json."""
    config = read_json(folder / "config.json", "a draft's folder")
    return config.get("architectures") == [CHAIN_ARCHITECTURE]
