"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A token's keys and values of all heads are products of one latent vector; beside it stands a rotated
key that all heads share. Both together are stored, once per token. Instead of expanding latents, a
query is multiplied by its head's key matrix and a head's sum of latents by its value matrix: the
absorbed form. It is used by prefill, decoding and verification alike, so that their sums are the
same ones.

Legend: T query rows, E hidden, H query heads, A inputs of queries, N plain and R rotated dims of a
query, L latent dim, D = R + L, V value dim of a head, P positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rollout.models.forward_context import StepAttention
from rollout.models.head_parts import HeadParts
from rollout.models.layers.head_linear import HeadLinear
from rollout.models.layers.linear import Linear, linear_weight_loaders
from rollout.models.layers.shard import shards_of
from rollout.models.layers.split_linear import SplitLinear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec
from rollout.ops.rms_norm import rms_norm
from rollout.parallel.partition import scaled

_NORM_EPSILON = 1e-6  # of the two norms of latents, whatever the model's


class LatentAttention:
    """Latent attention in its absorbed form. Each of several ranks has some heads and all latents.

    Rotated dims come first in queries and keys, and in halves instead of pairs: loading reorders
    rows.
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
            layer: index in the model; all layers are alike.
            inputs: features of a row; default: the hidden size.
        """
        assert spec.latent is not None
        self.spec, self.latent = spec, spec.latent
        self._group = group = weights.ranks.tensor
        latent, heads = self.latent, spec.num_heads
        inputs = inputs or spec.hidden_size

        self._query_dim = latent.plain_dim + spec.rotary_dim
        self.q_a: Linear | None = None
        self.q_norm_A: torch.Tensor | None = None
        if latent.query_rank is not None:
            self.q_a = weights.linear(inputs, latent.query_rank, bias=spec.qkv_bias)
            self.q_norm_A = weights.tensor(latent.query_rank)
        self.q = weights.linear(latent.query_rank or inputs, heads * self._query_dim)
        self.kv_a = weights.linear(inputs, spec.head_dim, bias=spec.qkv_bias)
        self.kv_norm_L = weights.tensor(latent.rank)
        self.absorb_k = HeadLinear(heads, latent.plain_dim, latent.rank, weights)
        self.expand_v = HeadLinear(heads, latent.rank, latent.value_dim, weights)
        self._heads = HeadParts.of(spec.entire, group.size).queries
        attended = scaled(self._heads, latent.value_dim)
        self.o = SplitLinear(weights, group, attended, spec.hidden_size, bias=spec.o_bias)

    def __call__(
        self,
        index: int,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The attention's output [T, E], to add to the residual.

        ``index``: among attention layers. ``rows_R``: of these rows alone, [R, E].
        """
        latent, rotary_dim = self.latent, self.spec.rotary_dim
        query_TA = hidden_TE
        if self.q_a is not None and self.q_norm_A is not None:
            query_TA = rms_norm(self.q_a(hidden_TE), self.q_norm_A, _NORM_EPSILON)
        query_THQ = self.q(query_TA).view(-1, self.spec.num_heads, self._query_dim)
        plain_THN, rotary_THR = query_THQ.split((latent.plain_dim, rotary_dim), dim=2)
        left_out = self.kv_a.left_out_tiles
        q_THD = query_THQ.new_empty((*query_THQ.shape[:2], self.spec.head_dim))
        q_THD[..., :rotary_dim] = rotary_THR
        self.absorb_k(plain_THN, q_THD[..., rotary_dim:], left_out)
        rotary_TR, latent_TL = self.kv_a(hidden_TE).split((rotary_dim, latent.rank), dim=1)
        latent_TL = rms_norm(latent_TL, self.kv_norm_L, _NORM_EPSILON)
        k_T1D = torch.cat([rotary_TR, latent_TL], dim=1)[:, None]
        sums_THL = attention.run(index, q_THD, k_T1D, None, positions_T, cos_sin_PD, rows_R)
        return self.o(self.expand_v(sums_THL, left_out=left_out).flatten(1))

    def linears(self) -> list[Linear]:
        """The mixer's matrix products."""
        first = [] if self.q_a is None else [self.q_a]
        return [*first, self.q, self.kv_a, self.o.linear]

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer."""
        heads = [self.absorb_k.weights, self.expand_v.weights]
        return [*self._norms().values(), *heads, *self.o.plain_weights()]

    def _norms(self) -> dict[str, torch.Tensor]:
        found = {"kv_a_layernorm": self.kv_norm_L}
        return found if self.q_norm_A is None else found | {"q_a_layernorm": self.q_norm_A}

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. ``at``: their prefix, such as model.layers.0.self_attn."""
        latent, plain_dim, rotary_dim = self.latent, self.latent.plain_dim, self.spec.rotary_dim
        norms = self._norms().items()
        found = {f"{at}.{name}.weight": WeightLoader.of(norm) for name, norm in norms}
        if self.q_a is not None:
            found |= linear_weight_loaders(at, self.q_a, {"q_a_proj": self.q_a.out_features})

        halves_R = torch.arange(rotary_dim)
        if latent.interleaved:  # pair i is dims 2i and 2i + 1
            halves_R = halves_R.view(-1, 2).t().flatten()
        name = "kv_a_proj_with_mqa"
        order_D = torch.cat([latent.rank + halves_R, torch.arange(latent.rank)])
        kv_a = linear_weight_loaders(at, self.kv_a, {name: self.spec.head_dim})
        found |= {name: loader.reordered(order_D) for name, loader in kv_a.items()}

        name = "q_proj" if self.q_a is None else "q_b_proj"
        order_Q = torch.cat([torch.arange(plain_dim), plain_dim + halves_R])
        starts_H = torch.arange(self.spec.num_heads) * self._query_dim
        own = {
            f"{at}.{name}.weight": self.q.weight_rows(0, self.q.out_features).reordered(
                (starts_H[:, None] + order_Q).flatten()
            ),
            f"{at}.kv_b_proj.weight": self._kv_b(),
        }
        found |= self.o.weight_loaders(at, "o_proj")
        parts = {
            name: scaled(self._heads, self._query_dim),
            "kv_b_proj": scaled(self._heads, plain_dim + latent.value_dim),
        }
        return found | shards_of(own, self._group, parts)

    def _kv_b(self) -> WeightLoader:
        """A loader of this rank's heads of kv_b_proj, [H * (N + V), L]: each head's keys, which map
        to latents, then its values."""
        latent, heads = self.latent, self.spec.num_heads
        shape = (heads, latent.plain_dim + latent.value_dim, latent.rank)
        keys = [self.absorb_k.head(head) for head in range(heads)]
        values = [self.expand_v.head(head) for head in range(heads)]

        def write(whole: torch.Tensor) -> None:
            for key, value, both in zip(keys, values, whole.view(shape), strict=True):
                key.write(both[: latent.plain_dim].t())
                value.write(both[latent.plain_dim :])

        def read() -> torch.Tensor:
            found = [
                torch.cat([key.read().t(), value.read()])
                for key, value in zip(keys, values, strict=True)
            ]
            return torch.cat(found)

        return replace(
            keys[0],
            shape=(shape[0] * shape[1], shape[2]),
            write=write,
            read=read,
            location=(id(self), 0),
        )
