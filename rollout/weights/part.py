"""One model that weights are sent to: the target, or a draft."""

from __future__ import annotations

from typing import Protocol

from rollout.models.layers.weight_loader import WeightLoader


class WeightPart(Protocol):
    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Checkpoint names to where their tensors go. Ask anew for each update: tied names
        remember which of them was written."""
        ...

    def finish_loading(self) -> None:
        """Called when the writes of an update are done."""
        ...

    def release(self) -> int:
        """Free the memory of every tensor; the bytes freed. 0 for what another part freed.

        Nothing is read, written or run until ``allocate``.
        """
        ...

    def allocate(self) -> None:
        """Memory for every tensor again, to be written to; the values are undefined."""
        ...
