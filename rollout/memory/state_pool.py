"""Recurrent-state tensors: two per recurrent layer, a row per state slot."""

from __future__ import annotations

import torch

from rollout.models.hybrid_config import LinearAttentionSpec
from rollout.models.layers.storage import allocate_storage, free_storage
from rollout.ops.state_plan import NO_STATE


class StatePool:
    """Per recurrent layer, with S = num_slots + 1 slots:

    ``convolutions`` [S, C, W - 1] in the model's dtype: the last inputs of the short convolution,
    oldest first. ``recurrent`` [S, G, K, V] float32.

    A slot holds one state of all layers. Slot 0 is the state of no tokens: zeros, never written to.
    """

    def __init__(
        self,
        spec: LinearAttentionSpec,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        conv = (num_slots + 1, spec.channels, spec.conv_width - 1)
        recurrent = (num_slots + 1, spec.num_value_heads, spec.key_dim, spec.value_dim)
        self.num_slots = num_slots
        self.convolutions = [torch.empty(conv, dtype=dtype, device=device) for _ in spec.layers]
        self.recurrent = [torch.empty(recurrent, device=device) for _ in spec.layers]
        self._clear_null_slot()

    @staticmethod
    def bytes_per_slot(spec: LinearAttentionSpec, dtype: torch.dtype) -> int:
        """Bytes of one state of all layers. ``dtype``: the model's."""
        convolution = spec.channels * (spec.conv_width - 1) * dtype.itemsize
        recurrent = spec.num_value_heads * spec.key_dim * spec.value_dim * torch.float32.itemsize
        return len(spec.layers) * (convolution + recurrent)

    def release(self) -> int:
        """Free the memory; nothing may run until ``allocate``. Returns the bytes freed."""
        return sum(free_storage(tensor) for tensor in self.convolutions + self.recurrent)

    def allocate(self) -> None:
        """Allocate the same slots again, with undefined contents but for slot 0."""
        for tensor in self.convolutions + self.recurrent:
            allocate_storage(tensor)
        self._clear_null_slot()

    def _clear_null_slot(self) -> None:
        for tensor in self.convolutions + self.recurrent:
            tensor[NO_STATE].zero_()
