"""Attention over paged KV: rotate, store this step's keys and values, then attend.

Legend: T query rows, H query heads, K kv heads, D head dim; of the rotary table P positions,
D rotary dims.
"""

from __future__ import annotations

import torch

from rollout.ops.paged_attention import AttentionPlan, paged_attention
from rollout.ops.rotary_store_kv import rotary_store_kv_


class PagedAttention:
    """One step's attention: what the plan fixes once, every layer runs with.

    A model calls ``run`` for each of its attention layers and knows nothing of pools and slots.
    """

    def __init__(
        self,
        *,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        slots_T: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
    ) -> None:
        self._keys = keys
        self._values = values
        self._slots_T = slots_T
        self._plan = plan
        self._scale = scale

    def run(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
    ) -> torch.Tensor:
        """Store keys and values of all rows, then attend from all rows. Returns [T, H, D]."""
        keys, values = self._keys[layer], self._values[layer]
        rotary_store_kv_(q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, keys, values, self._slots_T)
        return paged_attention(q_THD, keys, values, self._plan, self._scale)
