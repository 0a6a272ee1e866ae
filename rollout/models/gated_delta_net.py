"""The recurrent half of a decoder layer: a gated delta network with a short convolution before it.

Source: Gated Delta Networks (Yang, Kautz and Hatamizadeh 2024), as Qwen3-Next and Qwen3.5 have it.

Legend: T query rows, E hidden, C channels, W taps, H key heads of K dims, G value heads of V dims.
"""

from __future__ import annotations

import torch

from rollout.layers.destination import Destination
from rollout.layers.linear import Linear, linear_destinations
from rollout.models.causal_lm import LayerStates
from rollout.models.spec import ModelSpec
from rollout.ops.delta_gates import delta_gates
from rollout.ops.gated_rms_norm import gated_rms_norm


class GatedDeltaNet:
    """Queries, keys, values, output gates, step sizes and decays are one product, in this order.

    Decay rates and their biases stay float32, which holds whatever dtype they are kept in.
    """

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, packing: bool
    ) -> None:
        assert spec.linear_attention is not None
        self.spec = spec.linear_attention
        self.eps = spec.rms_norm_eps
        value_heads, value_dim = self.spec.num_value_heads, self.spec.value_dim
        values = value_heads * value_dim
        self._widths = (self.spec.channels, values, value_heads, value_heads)

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, dtype=dtype, device=device, packing=packing)

        def table(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.inputs = linear(spec.hidden_size, sum(self._widths))
        self.conv_CW = table(self.spec.channels, self.spec.conv_width)
        self.log_rates_G = table(value_heads, dtype=torch.float32)
        self.rate_bias_G = table(value_heads, dtype=torch.float32)
        self.norm_V = table(value_dim)
        self.output = linear(values, spec.hidden_size)

    def __call__(self, index: int, hidden_TE: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """[T, E], to be added to the residual. ``index``: among the recurrent layers."""
        spec = self.spec
        values, keys = (-1, spec.num_value_heads, spec.value_dim), spec.num_key_heads * spec.key_dim
        x_TC, gate, b_TG, a_TG = self.inputs(hidden_TE).split(self._widths, dim=1)
        mixed_TC = states.convolve(index, x_TC, self.conv_CW, None)
        q, k, v = mixed_TC.split((keys, keys, spec.channels - 2 * keys), dim=1)
        log_decay_TG, beta_TG = delta_gates(a_TG, b_TG, self.log_rates_G, self.rate_bias_G)
        out_TGV = states.delta_rule(
            index,
            q.view(-1, spec.num_key_heads, spec.key_dim),
            k.view(-1, spec.num_key_heads, spec.key_dim),
            v.view(values),
            log_decay_TG,
            beta_TG,
        )
        normed_TGV = gated_rms_norm(out_TGV, gate.view(values), self.norm_V, self.eps)
        return self.output(normed_TGV.flatten(1))

    def linears(self) -> list[Linear]:
        return [self.inputs, self.output]

    def plain_weights(self) -> list[torch.Tensor]:
        return [self.conv_CW, self.log_rates_G, self.rate_bias_G, self.norm_V]

    def destinations(self, at: str) -> dict[str, Destination]:
        """``at``: the prefix of its names in checkpoints, as model.layers.0.linear_attn."""
        conv_C1W = self.conv_CW.unsqueeze(1)
        found = {
            f"{at}.conv1d.weight": Destination.of(conv_C1W, (id(self.conv_CW), 0)),
            f"{at}.A_log": Destination.of(self.log_rates_G),
            f"{at}.dt_bias": Destination.of(self.rate_bias_G),
            f"{at}.norm.weight": Destination.of(self.norm_V),
        }
        found |= linear_destinations(at, self.output, {"out_proj": self.output.out_features})
        return found | self._input_destinations(at)

    def _input_destinations(self, at: str) -> dict[str, Destination]:
        channels, values, step_sizes, decays = self._widths
        if not self.spec.interleaved:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            return linear_destinations(at, self.inputs, dict(zip(names, self._widths, strict=True)))
        spec = self.spec
        per_key_head = spec.num_value_heads // spec.num_key_heads
        widths = (spec.key_dim, spec.key_dim, *[per_key_head * spec.value_dim] * 2)
        parts = {"in_proj_qkvz": channels + values, "in_proj_ba": step_sizes + decays}
        found = linear_destinations(at, self.inputs, parts)
        for name, of_a_head in (("in_proj_qkvz", widths), ("in_proj_ba", (per_key_head,) * 2)):
            name = f"{at}.{name}.weight"
            found[name] = found[name].reordered(_apart(of_a_head, spec.num_key_heads))
        return found


def _apart(widths: tuple[int, ...], num_heads: int) -> torch.Tensor:
    """Of rows kept head by head, each its parts one after the other: all of the first part, ..."""
    rows = torch.arange(num_heads * sum(widths)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(widths, dim=1)])
