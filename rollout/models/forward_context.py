"""A step's attention and recurrent states, as a model's layers call them.

Legend: T query rows, R rows that attend, H query heads, K kv heads, D head dim; of the rotary table
P positions, D rotary dims; of linear attention C channels, W taps, H key heads of K, G value heads
of V.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollout.ops.latent_attention import latent_attention
from rollout.ops.paged_attention import PLAIN, AttentionPlan, AttentionVariant, paged_attention
from rollout.ops.rotary_store_kv import rotary_store_kv_


class StepAttention:
    """One step's attention, planned once and passed to ``forward``, which runs it in each layer.

    The model knows no pools, slots or plans."""

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

    def store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor | None,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        variant: AttentionVariant = PLAIN,
    ) -> None:
        """The first half of `run`: rotate, and store keys and values."""
        values = None if v_TKD is None else self._values[layer]
        slots_T, _ = self._everywhere if variant.window is None else self._windowed
        rotary_store_kv_(
            q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, self._keys[layer], values, slots_T
        )

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
        """Rotate queries and keys, store keys and values, then attend from every row. Returns
        [T, H, D], dtype of q.

        q, k and v may be strided views. q is rotated in place. k is undefined afterwards and must
        not be read (see `rotary_store_kv_`). ``layer``: index among the attention layers.
        ``v_TKD``: None for latent attention, whose values are the keys without their rotated
        dims: [T, H, D without these]. ``rows_R``: attend from these alone, which are the query rows
        of the plan, [R, H, D]; all rows have keys and values. ``variant``: the layer's own, the
        same at each call.
        """
        keys, values = self._keys[layer], None if v_TKD is None else self._values[layer]
        _, plan = self._everywhere if variant.window is None else self._windowed
        self.store(layer, q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, variant)
        if rows_R is not None:
            q_THD = q_THD[rows_R]
        if values is None:
            return latent_attention(q_THD, keys, plan, self._scale, cos_sin_PD.shape[1])
        return paged_attention(q_THD, keys, values, plan, self._scale, variant)


class LayerStates(Protocol):
    """One step's recurrent states, passed to ``forward`` of models with linear attention.

    Every row reads the state of the row before it on its own path and no other. The model does not
    know the states' slots. ``layer``: index among the linear-attention layers.
    """

    def convolve(
        self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
    ) -> torch.Tensor:
        """`ops.causal_conv` over the layer's convolution states: [T, C] in the dtype of x."""
        ...

    def delta_rule(
        self,
        layer: int,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_TGV: torch.Tensor,
        log_decay_TG: torch.Tensor,
        beta_TG: torch.Tensor,
    ) -> torch.Tensor:
        """`ops.gated_delta_rule` over the layer's recurrent states: [T, G, V], dtype of v."""
        ...
