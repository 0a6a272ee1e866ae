"""The weights of one decoder layer, and its two halves: attention and MLP.

What is normed before the attention, and what is added to the residual, is its model's.

Legend: T query rows, I attention inputs, E hidden, F ffn, H query heads, K kv heads, D head dim,
P positions.
"""

from __future__ import annotations

import torch

from rollout.layers.destination import Destination
from rollout.layers.linear import Linear
from rollout.models.causal_lm import LayerAttention
from rollout.models.spec import ModelSpec
from rollout.ops.rms_norm import rms_norm
from rollout.ops.rotary import rotary_
from rollout.ops.silu_mul import silu_mul


class DecoderLayer:
    """Query, key and value are one product, and gate and up are one."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        packing: bool,
        attention_inputs: int | None = None,
    ) -> None:
        """``attention_inputs``: I; default: the hidden size."""

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device, packing=packing)

        def norm(width: int) -> torch.Tensor:
            return torch.empty(width, dtype=dtype, device=device)

        hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
        kv_heads = spec.num_kv_heads * spec.head_dim
        self.spec = spec
        self.qkv = linear(attention_inputs or hidden, heads + 2 * kv_heads, spec.qkv_bias)
        self.q_norm_D = norm(spec.head_dim) if spec.qk_norm else None
        self.k_norm_D = norm(spec.head_dim) if spec.qk_norm else None
        self.o = linear(heads, hidden, spec.o_bias)
        self.mlp_norm_E = norm(hidden)
        self.gate_up = linear(hidden, 2 * spec.ffn_size, spec.mlp_bias)
        self.down = linear(spec.ffn_size, hidden, spec.mlp_bias)

    def attend(
        self,
        index: int,
        hidden_TI: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: LayerAttention,
    ) -> torch.Tensor:
        """[T, E], to be added to the residual. ``index``: the layer's, for the attention."""
        spec = self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        qkv_THD = self.qkv(hidden_TI).view(-1, sum(heads), spec.head_dim)
        q_THD, k_TKD, v_TKD = qkv_THD.split(heads, dim=1)
        if self.q_norm_D is not None and self.k_norm_D is not None:
            q_THD = rms_norm(q_THD, self.q_norm_D, spec.rms_norm_eps)
            k_TKD = rms_norm(k_TKD, self.k_norm_D, spec.rms_norm_eps)
        rotary_(q_THD, k_TKD, positions_T, cos_sin_PD)
        return self.o(attention.run(index, q_THD, k_TKD, v_TKD).flatten(1))

    def feed_forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E], to be added to the residual. The input is normed already."""
        return self.down(silu_mul(self.gate_up(hidden_TE)))

    def linears(self) -> list[Linear]:
        return [self.qkv, self.o, self.gate_up, self.down]

    def norms(self) -> dict[str, torch.Tensor]:
        """By the names checkpoints have for them in a layer."""
        found = {
            "self_attn.q_norm": self.q_norm_D,
            "self_attn.k_norm": self.k_norm_D,
            "post_attention_layernorm": self.mlp_norm_E,
        }
        return {name: norm for name, norm in found.items() if norm is not None}

    def destinations(self, at: str) -> dict[str, Destination]:
        """``at``: the prefix of the layer's names in checkpoints, as model.layers.0."""
        spec = self.spec
        found = {f"{at}.{name}.weight": Destination.of(norm) for name, norm in self.norms().items()}
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        found |= linear_destinations(attention, self.qkv, qkv)
        found |= linear_destinations(attention, self.o, {"o_proj": spec.hidden_size})
        gate_up = {"gate_proj": spec.ffn_size, "up_proj": spec.ffn_size}
        found |= linear_destinations(mlp, self.gate_up, gate_up)
        found |= linear_destinations(mlp, self.down, {"down_proj": spec.hidden_size})
        return found


def linear_destinations(
    prefix: str, linear: Linear, widths: dict[str, int]
) -> dict[str, Destination]:
    """A fused product's rows, part by part under the names checkpoints have for them."""
    found: dict[str, Destination] = {}
    start = 0
    for name, width in widths.items():
        found[f"{prefix}.{name}.weight"] = linear.weight_rows(start, start + width)
        if linear.bias_O is not None:
            found[f"{prefix}.{name}.bias"] = linear.bias_rows(start, start + width)
        start += width
    return found
