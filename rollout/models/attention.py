"""The attention half of a decoder layer, with its projections.

Legend: T query rows, I inputs, E hidden, H query heads, K kv heads, D head dim, P positions.
"""

from __future__ import annotations

import torch

from rollout.models.forward_context import StepAttention
from rollout.models.head_parts import HeadParts
from rollout.models.layers.linear import Linear, linear_weight_loaders
from rollout.models.layers.shard import shards_of
from rollout.models.layers.split_linear import SplitLinear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec
from rollout.ops.gates import sigmoid_gate_
from rollout.ops.paged_attention import AttentionVariant
from rollout.ops.rms_norm import rms_norm
from rollout.parallel.partition import scaled


class Attention:
    """Attention whose query, key, value and gate projections are one fused product.

    A gated attention (Qiu et al. 2025) scales each head's output elementwise by the sigmoid of a
    second query projection. Checkpoints store each head's gate after its query; here all gates come
    after all queries.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightFactory,
        *,
        layer: int = 0,
        inputs: int | None = None,
    ) -> None:
        """
        Args:
            spec: of this rank's part of the model.
            layer: index in the model.
            inputs: I; default: the hidden size.
        """

        self.spec = spec
        self._group = group = weights.ranks.tensor
        self.variant = AttentionVariant(
            window=spec.window_of(layer), soft_cap=spec.attention_soft_cap
        )
        gates = spec.num_heads if spec.gated_attention else 0
        self.heads = (spec.num_heads, gates, spec.num_kv_heads, spec.num_kv_heads)
        outputs = sum(self.heads) * spec.head_dim
        self.qkv = weights.linear(inputs or spec.hidden_size, outputs, bias=spec.qkv_bias)
        self.q_norm_D = weights.tensor(spec.head_dim) if spec.qk_norm else None
        self.k_norm_D = weights.tensor(spec.head_dim) if spec.qk_norm else None
        attended = scaled(HeadParts.of(spec.entire, group.size).queries, spec.head_dim)
        self.o = SplitLinear(weights, group, attended, spec.hidden_size, bias=spec.o_bias)

    def __call__(
        self,
        index: int,
        hidden_TI: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The attention's output [T, E], to add to the residual.

        ``index``: among attention layers. ``rows_R``: of these rows alone, [R, E].
        """
        spec = self.spec
        qkv_THD = self.qkv(hidden_TI).view(-1, sum(self.heads), spec.head_dim)
        q_THD, gate_THD, k_TKD, v_TKD = qkv_THD.split(self.heads, dim=1)
        q_THD, k_TKD = self.normed(q_THD, k_TKD)
        attended_THD = attention.run(
            index, q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, rows_R, self.variant
        )
        if spec.gated_attention:
            sigmoid_gate_(attended_THD, gate_THD if rows_R is None else gate_THD[rows_R])
        return self.o(attended_THD.flatten(1))

    def normed(self, q_THD: torch.Tensor, k_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys after their norms, if there are any."""
        if self.q_norm_D is None or self.k_norm_D is None:
            return q_THD, k_TKD
        eps, unit_offset = self.spec.rms_norm_eps, self.spec.norm_unit_offset
        return (
            rms_norm(q_THD, self.q_norm_D, eps, unit_offset),
            rms_norm(k_TKD, self.k_norm_D, eps, unit_offset),
        )

    def linears(self) -> list[Linear]:
        """The mixer's matrix products."""
        return [self.qkv, self.o.linear]

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer."""
        return [*self._norms().values(), *self.o.plain_weights()]

    def _norms(self) -> dict[str, torch.Tensor]:
        found = {"q_norm": self.q_norm_D, "k_norm": self.k_norm_D}
        return {name: norm for name, norm in found.items() if norm is not None}

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. ``at``: their prefix, such as model.layers.0.self_attn."""
        spec = self.spec
        found = {
            f"{at}.{name}.weight": WeightLoader.of(norm) for name, norm in self._norms().items()
        }
        q, gate, k, v = (heads * spec.head_dim for heads in self.heads)
        own = linear_weight_loaders(at, self.qkv, {"q_proj": q + gate, "k_proj": k, "v_proj": v})
        if gate:
            by_head = torch.arange(q + gate).view(spec.num_heads, 2, spec.head_dim)
            order = by_head.transpose(0, 1).flatten()
            for name in own.keys() & {f"{at}.q_proj.weight", f"{at}.q_proj.bias"}:
                own[name] = own[name].reordered(order)
        heads = HeadParts.of(spec.entire, self._group.size)
        queries = scaled(heads.queries, spec.head_dim * (2 if gate else 1))
        keys = scaled(heads.keys, spec.head_dim)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        found |= self.o.weight_loaders(at, "o_proj")
        return found | shards_of(own, self._group, parts)
