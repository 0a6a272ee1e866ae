"""A model of plain tensors, for tests of what brings weights to one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout.models.layers.storage import allocate_storage, free_storage
from rollout.models.layers.weight_loader import WeightLoader


class PlainPart:
    def __init__(
        self, own: Mapping[str, torch.Tensor], borrowed: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """``borrowed``: what another part of the same worker owns; it goes and comes with that."""
        self.own = dict(own)
        self.tensors = {**(borrowed or {}), **self.own}
        self.finished = 0

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {name: WeightLoader.of(tensor) for name, tensor in self.tensors.items()}

    def finish_loading(self) -> None:
        self.finished += 1

    def release(self) -> int:
        return sum(free_storage(tensor) for tensor in self.own.values())

    def allocate(self) -> None:
        for tensor in self.own.values():
            allocate_storage(tensor)
