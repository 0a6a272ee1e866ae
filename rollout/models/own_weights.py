"""Networks and parts of them as the owners of weights: packing, freeing and allocating them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from rollout.models.layers.linear import Linear
from rollout.models.layers.storage import allocate_storage, free_storage
from rollout.models.layers.weight_loader import WeightLoader


class OwnWeights(ABC):
    """A network that lists its own weights. Weights shared from another network are not listed."""

    @abstractmethod
    def linears(self) -> list[Linear]:
        """The network's own matrix products."""
        ...

    @abstractmethod
    def _plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer, including tables tied to one."""
        ...

    def finish_loading(self) -> None:
        """Call after the last write of a load or update."""
        for linear in self.linears():
            linear.pack()

    def release(self) -> int:
        """Free the memory of every weight. Returns the bytes. Only ``allocate`` may be called
        next."""
        freed = sum(linear.release() for linear in self.linears())
        return freed + sum(free_storage(tensor) for tensor in self._plain_weights())

    def allocate(self) -> None:
        """Allocate every weight again, tables before the products tied to them."""
        for tensor in self._plain_weights():
            allocate_storage(tensor)
        for linear in self.linears():
            linear.allocate()


class LayerHalf(Protocol):
    """One half of a decoder layer, the mixer or the MLP, as the owner of weights."""

    def linears(self) -> list[Linear]:
        """The half's matrix products."""
        ...

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer."""
        ...

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name, which begins with ``at``, such as model.layers.0.mlp."""
        ...
