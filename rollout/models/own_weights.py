"""OwnWeights: what becomes of a network's weights, whatever the network."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from rollout.models.layers.linear import Linear
from rollout.models.layers.storage import allocate_storage, free_storage


class OwnWeights(ABC):
    """A network that says what it is made of. What it reads of another is no part of it."""

    @abstractmethod
    def linears(self) -> list[Linear]:
        """Every matrix product of its own."""
        ...

    @abstractmethod
    def _plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer, tables that one is tied to included."""
        ...

    def finish_loading(self) -> None:
        """Call when the writes of a load or update are done."""
        for linear in self.linears():
            linear.pack()

    def release(self) -> int:
        """Free the memory of every weight; the bytes freed. Only ``allocate`` may come next."""
        freed = sum(linear.release() for linear in self.linears())
        return freed + sum(free_storage(tensor) for tensor in self._plain_weights())

    def allocate(self) -> None:
        """Memory for every weight again. Tables come before the products tied to them."""
        for tensor in self._plain_weights():
            allocate_storage(tensor)
        for linear in self.linears():
            linear.allocate()
