"""Attention of a step: planned once, run once per layer.

Legend: T query rows; H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch

from rollout.ops.latent_attention import latent_attention
from rollout.ops.paged_attention import PLAIN, AttentionPlan, AttentionVariant, paged_attention
from rollout.ops.rotary_store_kv import rotary_store_kv_


class StepAttention:
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
        windowed: tuple[torch.Tensor, AttentionPlan] | None = None,
    ) -> None:
        """``windowed``: slots [T] and plan of layers with a window; None: the others'."""
        self._keys = keys
        self._values = values
        self._everywhere = (slots_T, plan)
        self._windowed = windowed or self._everywhere
        self._scale = scale

    def run(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor | None,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        rows_R: torch.Tensor | None = None,
        variant: AttentionVariant = PLAIN,
    ) -> torch.Tensor:
        """Store keys and values of all rows, then attend from all rows. Returns [T, H, D].

        ``v_TKD``: None for latent attention; the result is then [T, H, D without rotated dims].
        ``rows_R``: attend from these alone, which are the query rows of the plan.
        """
        keys, values = self._keys[layer], None if v_TKD is None else self._values[layer]
        slots_T, plan = self._everywhere if variant.window is None else self._windowed
        rotary_store_kv_(q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, keys, values, slots_T)
        if rows_R is not None:
            q_THD = q_THD[rows_R]
        if values is None:
            return latent_attention(q_THD, keys, plan, self._scale, cos_sin_PD.shape[1])
        return paged_attention(q_THD, keys, values, plan, self._scale, variant)
