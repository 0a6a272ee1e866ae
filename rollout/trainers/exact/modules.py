"""Forwards of transformers' modules by the engine's ops.

Legend: B sequences, T positions, E hidden, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from rollout.errors import InvalidInputError
from rollout.models.spec import ModelSpec
from rollout.ops.glu import gelu_mul
from rollout.ops.paged_attention import AttentionVariant
from rollout.ops.rms_norm import rms_norm
from rollout.trainers.exact.attention import attend
from rollout.trainers.exact.functions import exactly
from rollout.trainers.exact.sequences import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class ExactNorm:
    """The forward of an RMS norm of transformers."""

    module: Any
    eps: float
    unit_offset: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        def op(x: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
            return rms_norm(x, weight_E, self.eps, self.unit_offset)

        def plain(x: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return normed * (weight_E + 1.0 if self.unit_offset else weight_E)

        return exactly(op, plain, x, self.module.weight)


@dataclass(frozen=True, slots=True, eq=False)
class ExactMlp:
    """The forward of a gated MLP."""

    module: Any
    spec: ModelSpec

    def __call__(self, hidden_BTE: torch.Tensor) -> torch.Tensor:
        module, activation = self.module, self.spec.activation
        gate_up = torch.cat((module.gate_proj(hidden_BTE), module.up_proj(hidden_BTE)), dim=-1)

        def op(gate_up: torch.Tensor) -> torch.Tensor:
            return activation(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], -1)

        def plain(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
            return (gelu(gate, approximate="tanh") if activation is gelu_mul else silu(gate)) * up

        return module.down_proj(exactly(op, plain, gate_up))


@dataclass(frozen=True, slots=True, eq=False)
class ExactAttention:
    """The forward of an attention module, projections included."""

    module: Any
    layer: int
    sequences: Sequences

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        module, spec = self.module, self.sequences.spec
        if past_key_values is not None:
            raise InvalidInputError(
                "past_key_values", "a cache", "exact_forward takes whole sequences: use_cache=False"
            )
        layout = self.sequences.layout(hidden_states, attention_mask, position_ids, cu_seq_lens_q)
        rows, num_rows = hidden_states.shape[:-1], hidden_states.shape[:-1].numel()
        q, k, v = (
            projection(hidden_states).view(num_rows, -1, spec.head_dim)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        if spec.qk_norm:
            q, k = module.q_norm(q), module.k_norm(k)
        if layout.rows_N is not None:
            q, k, v = (each[layout.rows_N] for each in (q, k, v))
        variant = AttentionVariant(
            window=spec.window_of(self.layer), soft_cap=spec.attention_soft_cap
        )
        table = self.sequences.tables[self.layer]
        out_NHD = attend(q, k, v, layout, table, spec.attention_scale, variant)
        return module.o_proj(layout.scattered(out_NHD, num_rows).view(*rows, -1)), None
