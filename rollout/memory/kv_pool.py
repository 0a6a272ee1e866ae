"""The keys and values themselves: one pair of tensors per attention layer, a row per slot."""

from __future__ import annotations

import torch


class KvPool:
    """Keys and values of shape [num_slots + 1, kv_heads, head_dim], per layer.

    Slot 0 is the null slot: padding rows write there and nothing ever reads it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots + 1, num_kv_heads, head_dim)
        self.num_slots = num_slots
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_slot(
        *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
