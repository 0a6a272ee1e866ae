"""The engine's ops, one by one, on rows that a trainer gives.

Legend: T rows, E hidden, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout.models.causal_lm import CausalLM
from rollout.models.layers.experts import Experts
from rollout.models.rotary_tables import rotary_tables
from rollout.ops.paged_attention import AttentionVariant, paged_attention
from rollout.ops.rms_norm import rms_norm
from rollout.ops.rotary_store_kv import rotary_store_kv_
from rollout.ops.routing import route
from rollout.trainers.exact.layout import SequenceLayout

_FEWEST_ROWS = 64
"""Rows that a product is given at least: fewer may not have the bits of many."""


class EngineOps:
    """The ops of an engine's model, its weights included. Rows are those of one sequence."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.spec = model.spec
        self._loaders = model.weight_loaders()
        self._tables = rotary_tables(model.spec, model.device)

    def norm(self, name: str, x: torch.Tensor, unit_offset: bool | None = None) -> torch.Tensor:
        """The RMS norm with the weight of that checkpoint name; any leading dimensions."""
        weight_E = self._loaders[name].read()
        offset = self.spec.norm_unit_offset if unit_offset is None else unit_offset
        return rms_norm(self._own(x), weight_E, self.spec.rms_norm_eps, offset)

    def rows(self, op: Callable[[torch.Tensor], torch.Tensor], x_T: torch.Tensor) -> torch.Tensor:
        """An op that reads each row alone. It is given so many as have the bits of many."""
        copies = -(-_FEWEST_ROWS // max(len(x_T), 1))
        return op(self._own(x_T).repeat(copies, 1))[: len(x_T)]

    def qkv(self, layer: int, x_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The projections of a layer: queries, keys and values, before norms and rotation."""
        spec, product = self.spec, self.model.layers[layer].linears()[0]
        widths = [heads * spec.head_dim for heads in (spec.num_heads, *[spec.num_kv_heads] * 2)]
        return self.rows(product, x_TE).split(widths, dim=1)

    def router(self, layer: int, x_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A sparse layer's logits [T, N], and of the chosen experts numbers and weights [T, X]."""
        experts = self.model.layers[layer].mlp
        assert isinstance(experts, Experts)
        spec = experts.spec
        logits_TN = self.rows(lambda x: experts.router(x.to(experts.router.dtype)), x_TE)
        logits_TN = logits_TN[:, : spec.num_experts].contiguous()
        return logits_TN, *route(logits_TN, spec.experts_per_token, spec.normalizes, spec.groups)

    def rotary(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of positions 0, 1, ... rotated."""
        q_THD, k_TKD = self._own(q_THD).clone(), self._own(k_TKD).clone()
        layout = self._layout(len(q_THD))
        pool = k_TKD.new_empty(len(k_TKD) + 1, *k_TKD.shape[1:])
        rotary_store_kv_(
            q_THD, k_TKD, None, layout.positions_N, self._tables[layer], pool, None, layout.slots_N
        )
        return q_THD, pool[layout.slots_N]

    def attention(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        window: int | None = -1,
    ) -> torch.Tensor:
        """Causal attention of rotated queries to rotated keys, [T, H, D]. ``window``: -1 is the
        layer's own."""
        spec = self.spec
        window = spec.window_of(layer) if window == -1 else window
        variant = AttentionVariant(window=window, soft_cap=spec.attention_soft_cap)
        layout = self._layout(len(q_THD))
        k_pool, v_pool = self._own(k_TKD).new_empty(2, len(k_TKD) + 1, *k_TKD.shape[1:])
        k_pool[layout.slots_N], v_pool[layout.slots_N] = self._own(k_TKD), self._own(v_TKD)
        scale = spec.attention_scale
        return paged_attention(self._own(q_THD), k_pool, v_pool, layout.plan, scale, variant)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.model.device, self.model.dtype).contiguous()

    def _layout(self, length: int) -> SequenceLayout:
        return SequenceLayout.of((1, length), None, None, None, self.model.device)
