"""Hidden states of a model that drafts and draft training read.

Legend: T query rows, E hidden, F columns of the features: E for each hidden state that is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxHiddenStates:
    """The hidden states of the target that a draft reads. Columns: layers ascending, then final."""

    # The residual stream that enters each of these layers, before its norm; the number of layers
    # stands for the input of the final norm.
    layers: tuple[int, ...] = ()
    final: bool = False  # the output of the final norm, which the head reads

    def __post_init__(self) -> None:
        if list(self.layers) != sorted(set(self.layers)) or any(each < 0 for each in self.layers):
            raise InvalidInputError("features.layers", self.layers, "must ascend from 0 or later")

    @property
    def count(self) -> int:
        """The number of hidden states: F over the hidden size."""
        return len(self.layers) + self.final

    def __or__(self, other: AuxHiddenStates) -> AuxHiddenStates:
        layers = tuple(sorted({*self.layers, *other.layers}))
        return AuxHiddenStates(layers=layers, final=self.final or other.final)

    def select(self, features_TF: torch.Tensor, wanted: AuxHiddenStates) -> torch.Tensor:
        """The columns of ``wanted``, which must be among these; may return ``features_TF``
        itself."""
        if wanted == self:
            return features_TF
        hidden = features_TF.shape[1] // self.count
        blocks = features_TF.split(hidden, dim=1)
        chosen = [blocks[self.layers.index(layer)] for layer in wanted.layers]
        return torch.cat(chosen + [blocks[-1]] * wanted.final, dim=1)


class AuxHiddenStateCollector:
    """Collects the features of one forward."""

    def __init__(
        self, features: AuxHiddenStates, rows: int, hidden: int, like: torch.Tensor
    ) -> None:
        """``like``: a tensor with the features' dtype and device."""
        self._features = features
        self._hidden = hidden
        self.features_TF = like.new_empty((rows, features.count * hidden))

    def enter(self, layer: int, residual_TE: torch.Tensor) -> None:
        """Called before each layer, and before the final norm with the number of layers."""
        if layer in self._features.layers:
            self._store(self._features.layers.index(layer), residual_TE)

    def leave(self, hidden_TE: torch.Tensor) -> None:
        """Called with the output of the final norm."""
        if self._features.final:
            self._store(len(self._features.layers), hidden_TE)

    def _store(self, column: int, values_TE: torch.Tensor) -> None:
        first, rows = column * self._hidden, len(self.features_TF)
        # Further rows of the values are padding.
        self.features_TF[:, first : first + self._hidden] = values_TE[:rows]
