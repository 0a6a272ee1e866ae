"""Key and value tensors: one pair per attention layer, a row per slot; latents instead of both."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from rollout.models.layers.storage import (
    allocate_storage,
    empty_alone,
    free_storage,
    prefer_huge_pages,
)


class KvPool:
    """Keys and values of shape [num_slots + 1, kv_heads, head_dim], per layer.

    Latent attention has no values beside its keys. Layers with a window may have fewer slots, of
    their own: see `rollout.memory.window_slots`.

    Slot 0 is the null slot: padding rows write there and nothing ever reads it.

    ``writes_S``, int64 [num_slots + 1]: the number of the forward that last wrote a slot, counted
    from 1; 0: never written. Data stored beside a slot's KV is stale once this number changes.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        has_values: bool = True,
        window_layers: Collection[int] = (),
        num_window_slots: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            window_layers: layers with ``num_window_slots`` slots of their own; None: with the
                slots of all layers.
        """
        self.num_slots = num_slots
        slots = [num_slots + 1] * num_layers
        if num_window_slots is not None:
            for layer in window_layers:
                slots[layer] = num_window_slots + 1

        def pools(slots: list[int]) -> list[torch.Tensor]:
            return [empty_alone((count, num_kv_heads, head_dim), dtype, device) for count in slots]

        self.keys = pools(slots)
        self.values = pools(slots if has_values else [])
        self.writes_S = np.zeros(num_slots + 1, dtype=np.int64)
        self._forwards = 0
        self.allocate()

    def note_forward(self, slots: np.ndarray) -> None:
        """Record that a forward is about to write these slots."""
        self._forwards += 1
        self.writes_S[slots] = self._forwards

    @staticmethod
    def bytes_per_slot(
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        has_values: bool = True,
        dtype: torch.dtype,
    ) -> int:
        """Bytes of one slot's keys and values in all layers."""
        return (1 + has_values) * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def release(self) -> int:
        """Free the memory; nothing may run until ``allocate``. Returns the bytes freed."""
        return sum(free_storage(tensor) for tensor in self.keys + self.values)

    def allocate(self) -> None:
        """Allocate released memory again, with undefined contents."""
        for tensor in self.keys + self.values:
            allocate_storage(tensor, alone=True)
            if tensor.device.type == "cpu":
                prefer_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
